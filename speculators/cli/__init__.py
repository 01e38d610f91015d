"""The `speculators` command: one thin module a subcommand. Heavy imports happen inside functions, so that help is instant."""
