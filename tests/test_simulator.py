"""The load simulator: closed forms, queues, and what must follow from its inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_verifier
from toy_drafters import BlockTable

from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round, conditional_acceptance_by_position
from speculators.decoding.step_times import StepTimes
from speculators.errors import ConfigError, DataError
from speculators.serving.drafter_profile import DrafterProfile
from speculators.serving.simulator import Auto, Fixed, Scheduler, Simulation, Threshold, make_policy, simulate
from speculators.serving.workload import Workload

TIMES = StepTimes.affine(8e-3, 4e-5, draft_fixed=1e-3, draft_a_token=2e-6, max_rows=512, max_drafts=7)
ACCEPTANCE = np.array([[0.885, 0.827, 0.820, 0.834, 0.841, 0.839, 0.828]])  # DFlash on mathematics (DSpark, figure 2)
INDEPENDENT = DrafterProfile("independent", ACCEPTANCE, TIMES)


def spread(rounds: int = 400) -> DrafterProfile:
    """Rounds of which some are sure and some are not."""
    generator = np.random.default_rng(0)
    logits = 0.8 + 2.0 * generator.normal(size=(rounds, 1)) + 0.5 * generator.normal(size=(rounds, 7))
    return DrafterProfile("spread", 1 / (1 + np.exp(-logits)), TIMES)


def closed(users: int, profile: DrafterProfile, policy: str, tokens: int = 1200, requests: int = 3, **options: object) -> Simulation:
    workload = Workload.closed_loop(users, tokens, requests)
    return simulate(workload, profile, make_policy(policy, profile, 512), max_batch=512, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("users", "drafts"), [(1, 7), (8, 7), (64, 7), (64, 3), (256, 0)])
def test_independent_acceptance_and_an_affine_step_time_give_the_closed_form(users: int, drafts: int) -> None:
    tau = 1 + float(np.cumprod(ACCEPTANCE[0, :drafts]).sum())
    seconds = 8e-3 + 4e-5 * users * (1 + drafts) + (1e-3 + 2e-6 * users * drafts if drafts else 0)
    result = closed(users, INDEPENDENT, f"fixed:{drafts}" if drafts else "none", tokens=4000 if users == 1 else 1200)
    # Rows end inside a block, so a reply of 1200 tokens takes about one round in 250 more.
    assert result.tokens_per_second == pytest.approx(users * tau / seconds, rel=0.01)
    assert result.tokens_per_second_a_user == pytest.approx(tau / seconds, rel=0.01)
    assert result.verified_a_step == drafts and result.mean_batch == pytest.approx(users, rel=0.05)


def test_gpus_share_the_users() -> None:
    one, four = closed(32, INDEPENDENT, "fixed:3", tokens=300), closed(128, INDEPENDENT, "fixed:3", tokens=300, gpus=4)
    assert four.tokens_per_second == pytest.approx(4 * one.tokens_per_second, rel=0.02)
    assert four.tokens_per_second_a_user == pytest.approx(one.tokens_per_second_a_user, rel=0.02)


def test_light_poisson_load_has_the_latency_of_an_idle_machine_and_heavy_load_queues() -> None:
    policy = make_policy("none", INDEPENDENT, 4)
    alone = 100 * (8e-3 + 4e-5)
    light = simulate(Workload.poisson(0.05, 40, 100, seed=0), INDEPENDENT, policy, max_batch=4)
    assert light.latency([50])[0] == pytest.approx(alone, rel=0.01)
    assert light.time_to_first_token([50])[0] == pytest.approx(8.04e-3, rel=0.01)
    # Four rows of 100 tokens take 0.816 s: 4.9 requests a second is all that such a machine can do.
    heavy = simulate(Workload.poisson(50.0, 200, 100, seed=0), INDEPENDENT, policy, max_batch=4)
    assert heavy.tokens_per_second == pytest.approx(4 / (8e-3 + 4 * 4e-5), rel=0.02)
    assert heavy.latency([99])[0] > 30 * alone and heavy.mean_batch > 3.9


def test_bursts_come_together_and_keep_the_rate() -> None:
    workload = Workload.poisson(10.0, 5000, 20, seed=1, burst=50)
    assert np.unique(workload.arrival[:50]).size == 1
    assert 5000 / workload.arrival[-1] == pytest.approx(10.0, rel=0.25)  # a hundred gaps
    calm = simulate(Workload.poisson(10.0, 800, 20, seed=1), INDEPENDENT, make_policy("none", INDEPENDENT, 8), max_batch=8)
    bursts = simulate(Workload.poisson(10.0, 800, 20, seed=1, burst=50), INDEPENDENT, make_policy("none", INDEPENDENT, 8), max_batch=8)
    assert bursts.latency([90])[0] > 2 * calm.latency([90])[0]


def test_every_request_is_served_once_in_order_and_never_before_it_came() -> None:
    workload = Workload.poisson(30.0, 150, 37, seed=2)
    result = simulate(workload, spread(), make_policy("scheduler", spread(), 16), gpus=3, max_batch=16)
    assert bool((result.start >= result.arrival).all()) and bool((result.first_token > result.start).all())
    assert bool((result.finish >= result.first_token).all())
    np.testing.assert_array_equal(result.arrival, workload.arrival)
    assert result.tokens_per_second * result.finish.max() == pytest.approx(150 * 37)


def test_equal_seeds_repeat_and_others_do_not() -> None:
    first, second, other = (closed(8, spread(), "fixed:7", tokens=100, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.finish, second.finish)
    assert not np.array_equal(first.finish, other.finish)


def test_long_blocks_win_alone_short_ones_in_a_crowd_and_auto_is_never_behind() -> None:
    for users in (1, 32, 256):
        speeds = {
            policy: closed(users, INDEPENDENT, policy, tokens=200).tokens_per_second for policy in ("none", "fixed:3", "fixed:7", "auto")
        }
        best = max(value for policy, value in speeds.items() if policy != "auto")
        assert speeds["auto"] >= 0.98 * best
    dear = DrafterProfile("dear", ACCEPTANCE * 0.6, StepTimes.affine(1e-3, 1e-3, max_rows=512, max_drafts=7))
    assert closed(256, dear, "fixed:7", tokens=200).tokens_per_second < closed(256, dear, "none", tokens=200).tokens_per_second


def test_confidence_earns_more_where_tokens_are_dear() -> None:
    profile = spread()
    speed = {
        policy: closed(256, profile, policy, tokens=120).tokens_per_second
        for policy in ("none", "fixed:1", "fixed:3", "fixed:7", "threshold:0.6", "scheduler")
    }
    assert speed["scheduler"] > 1.05 * max(value for policy, value in speed.items() if policy.startswith(("fixed", "none")))
    assert speed["scheduler"] >= 0.99 * speed["threshold:0.6"]
    padded = closed(256, profile, "scheduler", tokens=120, packed=False).tokens_per_second
    assert padded < speed["scheduler"], "rows padded to the longest block pay for what they do not verify"


def test_requests_that_are_unlike_make_batches_wait_for_the_slowest() -> None:
    accepted = np.random.default_rng(0).beta(8, 2.5, 64)
    confidence = np.repeat(accepted[:, None], 7, axis=1)
    pooled, grouped = (DrafterProfile("unlike", confidence, TIMES, request) for request in (None, np.arange(64)))
    for packed in (True, False):
        workload = Workload.closed_loop(64, 128, 6)
        runs = [
            simulate(workload, profile, make_policy("fixed:7", profile, 64), max_batch=64, packed=packed) for profile in (pooled, grouped)
        ]
        spread = [np.ptp(run.latency([10, 90])) / run.latency([50])[0] for run in runs]
        assert spread[1] > 2 * spread[0]
        if not packed:
            assert runs[1].finish.max() > 1.2 * runs[0].finish.max(), "a batch lasts as long as its slowest row"


def test_each_measured_request_is_simulated_once_before_any_is_again() -> None:
    # Requests 5 and 9 accept everything and nothing: a reply of 40 tokens takes 10 rounds of one, and 40 of the other.
    certain = DrafterProfile("two", np.array([[1.0] * 3, [0.0] * 3, [1.0] * 3]), TIMES, np.array([5, 9, 5]))
    workload = Workload.closed_loop(1, 40, 6)
    result = simulate(workload, certain, make_policy("fixed:3", certain, 1), max_batch=1)
    seconds = np.diff(np.concatenate([[0.0], result.finish])) / (8e-3 + 4 * 4e-5 + 1e-3 + 3 * 2e-6)
    assert np.sort(seconds.reshape(3, 2), axis=1) == pytest.approx(np.array([[10, 40]] * 3))
    with pytest.raises(ConfigError, match="3 rounds need as many request numbers"):
        DrafterProfile("two", certain.confidence, TIMES, np.array([5, 9]))


def test_measured_rounds_are_simulated_as_they_were_and_with_shorter_blocks() -> None:
    rounds = [[Round(3, 3, 4), Round(3, 1, 2), Round(3, 3, 4), Round(1, 1, 2)], [Round(3, 0, 1), Round(2, 0, 1)]]
    profile = DrafterProfile.from_rounds("measured", rounds, 3, TIMES)
    assert profile.confidence.sum(axis=1).tolist() == [3, 1, 3, 0, 0], "of the round with room for one draft nothing is known beyond it"
    assert profile.request is not None and profile.request.tolist() == [0, 0, 0, 1, 1]
    for drafts, tokens_a_round in ((3, 10 / 3), (2, 8 / 3), (1, 2)):
        workload = Workload.closed_loop(2, 3000, 1)
        result = simulate(workload, profile, make_policy(f"fixed:{drafts}", profile, 2), max_batch=2, packed=False)
        seconds = 8e-3 + 4e-5 * 2 * (1 + drafts) + 1e-3 + 2e-6 * 2 * drafts
        assert np.sort(result.finish) / seconds == pytest.approx([3000 / tokens_a_round, 3000], abs=1.01)
    with pytest.raises(ConfigError, match="at least one"):
        DrafterProfile.from_rounds("nothing", [[]], 3, TIMES)


def test_ten_thousand_users_are_simulated_in_seconds_of_work() -> None:
    workload = Workload.closed_loop(10_000, 24, 1)
    result = simulate(workload, INDEPENDENT, make_policy("fixed:3", INDEPENDENT, 256), gpus=40, max_batch=256)
    assert len(result.finish) == 10_000 and result.mean_batch > 100


def test_policies_are_named_as_they_are_asked_for_and_bad_ones_refused() -> None:
    names = ["none", "fixed:7", "threshold:0.6", "scheduler", "auto"]
    made = [make_policy(name, INDEPENDENT, 8) for name in names]
    assert [policy.name for policy in made] == names
    assert [type(policy) for policy in made] == [Fixed, Fixed, Threshold, Scheduler, Auto]
    for bad in ("fixed:8", "fixed:x", "threshold:2", "best", "auto:3", "none:1"):
        with pytest.raises(ConfigError, match=bad.partition(":")[0]):
            make_policy(bad, INDEPENDENT, 8)


def test_profiles_and_workloads_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="probabilities"):
        DrafterProfile("x", np.array([[1.2]]), TIMES)
    with pytest.raises(ConfigError, match="ascending"):
        Workload(np.array([1.0, 0.5]), np.array([1, 1]))
    with pytest.raises(ConfigError, match="output_tokens are whole numbers, not float64"):
        Workload(np.array([0.0]), np.array([2.5]))  # type: ignore[arg-type]
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 2, "output_tokens": 5}\n\n{"arrival": 1, "output_tokens": 7}\n')
    read = Workload.read(trace)
    assert read.arrival.tolist() == [1, 2] and read.output_tokens.tolist() == [7, 5]
    whole = "output_tokens = {} must be a whole number of at least 1"
    for number, said in (("2.5", "2.5"), ("true", "true"), ('"7"', '"7"'), ("0", "0")):
        trace.write_text(f'{{"arrival": 1, "output_tokens": 7}}\n{{"arrival": 2, "output_tokens": {number}}}\n')
        with pytest.raises(DataError, match=f"trace.jsonl, line 2: .*{re.escape(whole.format(said))}"):
            Workload.read(trace)
    for bad in ('{"arrival": 2}', '{"arrival": 2, "output_tokens": Infinity}'):
        trace.write_text(f"{bad}\n")
        with pytest.raises(DataError, match="line 1"):
            Workload.read(trace)
    for never in ("NaN", "Infinity"):
        trace.write_text(f'{{"arrival": {never}, "output_tokens": 5}}\n')
        with pytest.raises(DataError, match="finite arrivals"):
            Workload.read(trace)
    with pytest.raises(ConfigError, match="arrivals of rate inf"):
        Workload.poisson(float("inf"), 3, 5, seed=0)
    for number in ("Infinity", "0.5"):
        trace.write_text(json.dumps(TIMES.to_json()).replace('"rows": [', f'"rows": [{number}, '))
        with pytest.raises(DataError, match=f"does not hold step times .*rows = {number} must be a whole number"):
            StepTimes.load(trace)
    with pytest.raises(DataError, match="cannot be read"):
        Workload.read(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(("rows", "batches"), [(1, 14), (8, 5)])
def test_rounds_of_the_engine_are_predicted_from_its_acceptance(rows: int, batches: int) -> None:
    """A round costs 1 s, so tokens a second are tokens a verify forward: what time a machine needs does not enter."""
    verifier = tiny_verifier("llama", vocab_size=8, layers=1)
    drafter, tokens = BlockTable(8, scale=0.3), 48
    forwards, rounds = 0, []
    for batch in range(batches):
        prompts = [[1 + (row + batch) % 6, 2] for row in range(rows)]
        sampling = SamplingParams(temperature=1.0, max_new_tokens=tokens + 1, ignore_eos=True, seed=1000 * batch)
        result = generate(verifier, drafter, prompts, sampling, num_draft_tokens=4)
        forwards += result.verify_forwards
        rounds += [a_round for row_rounds in result.rounds for a_round in row_rounds]
    one_second = StepTimes((1, 2), (0, 4), ((0.0, 0.0),) * 2, ((1.0, 1.0),) * 2)
    profile = DrafterProfile("measured", np.array([conditional_acceptance_by_position(rounds)]), one_second)
    workload = Workload.closed_loop(rows, tokens, 400 // rows)
    simulated = simulate(workload, profile, make_policy("fixed:4", profile, rows), max_batch=rows, packed=False)
    assert len(workload) * tokens / simulated.finish.max() == pytest.approx(rows * tokens * batches / forwards, rel=0.1)
