"""The exceptions users see: one clear sentence each, saying what, where, the limit and the way out."""


class SpeculatorsError(Exception):
    """Base of every error this library raises on bad input. Commands print it and exit with code 2."""


class ConfigError(SpeculatorsError):
    """A configuration value is outside its range or contradicts another one."""


class CheckpointError(SpeculatorsError):
    """A checkpoint is missing, incomplete, damaged, or does not fit what it is loaded for."""


class PairingError(SpeculatorsError):
    """A speculator and a verifier do not belong together."""


class DataError(SpeculatorsError):
    """Prompts, conversations or training rows cannot be used."""


class TrainingInterrupted(SpeculatorsError):
    """SIGINT or SIGTERM stopped a training run after its state was saved.

    Attributes:
        exit_code: 128 + the signal's number, what a shell reports of a process that a signal ended.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
