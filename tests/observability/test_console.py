"""What a person reads: step lines, validation, faults, summary, with and without a terminal."""

import io

from jaxrl_ppo.observability.console import Console

METRICS = {
    "critic/score/mean": 0.4375,
    "response_length/mean": 31.6,
    "actor/ppo_kl": -0.00012,
    "actor/grad_norm": 1.234,
    "training/staleness": 1.0,
    "timing_s/step": 12.34,
    "timing_s/gen": 7.0,
    "timing_s/update_actor": 4.0,
    "timing_s/old_log_prob": 1.5,
    "timing_s/update_weights": 0.3,
    "perf/idle_share/trainer": 0.123,
    "perf/idle_share/rollout": 0.3,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with Console(total_steps=20, stream=out) as console:
        console.phase("generating")
        console.step(9, METRICS)
        console.validation(10, {"val-core/sums/acc/mean@1": 0.71875, "val-aux/sums/reward/std@1": 0.3})
        console.warning("tracker wandb failed")
        console.fault("replica 1 died: [not markup]")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(
        "step  9/20  reward   0.438  length   32  kl -1.2e-04  grad   1.23  stale 1   12.3 s "
        "(gen 7.0; train 5.5; sync 0.3)  idle trainer 12%, rollout 30%"
    )
    assert "left 0:" in lines[0]
    assert lines[1] == "validation at step 10: sums accuracy 0.719"
    assert lines[2:] == ["warning: tracker wandb failed", "fault: replica 1 died: [not markup]"]
    assert "\x1b" not in out.getvalue()


def test_a_bar_on_a_terminal():
    out = Terminal()
    with Console(total_steps=4, start_step=1, stream=out) as console:
        console.phase("generating")
        console.step(2, METRICS)
    assert "2/4" in out.getvalue()
    assert "generating" in out.getvalue()
    assert "reward   0.438" in out.getvalue()


def test_columns_stay_where_they_are_whatever_a_step_lacks():
    out = io.StringIO()
    first = {key: value for key, value in METRICS.items() if key != "actor/ppo_kl"} | {"actor/entropy": 0.5}
    with Console(total_steps=3, stream=out) as console:
        console.step(1, first)
        console.step(2, METRICS | {"num_turns/mean": 2.5, "critic/score/mean": -12.5})  # no entropy; turns came late
    lines = out.getvalue().splitlines()
    assert "kl        -  entropy  0.50" in lines[0]
    assert "kl -1.2e-04  entropy     -" in lines[1]
    assert "turns" not in lines[1]
    assert [lines[0].index(word) for word in ("grad", "stale", "s (")] == [
        lines[1].index(word) for word in ("grad", "stale", "s (")
    ]


def test_generation_beside_training_is_told_apart_from_the_steps_own_time():
    out = io.StringIO()
    with Console(total_steps=3, stream=out) as console:
        console.step(2, METRICS | {"timing_s/gen": 15.2, "perf/generation_overlapped_s": 14.96})
    assert "12.3 s (gen 0.2 and 15.0 beside the training before; train 5.5; sync 0.3)" in out.getvalue()


def test_a_validations_scores_come_once_and_in_words():
    out = io.StringIO()
    scores = {
        "val-core/openai/gsm8k/reward/mean@4": 0.25,
        "val-core/openai/gsm8k/reward/std@4": 0.1,
        "val-core/openai/gsm8k/reward/best@4/mean": 0.5,
        "val-core/openai/gsm8k/reward/worst@4/mean": 0.0,
        "val-core/openai/gsm8k/reward/maj@4/mean": 0.375,
        "val-core/sums/acc/mean@1": 1.0,
    }
    with Console(total_steps=3, stream=out) as console:
        console.validation(3, scores)
        console.step(3, METRICS | scores)
    line, step = out.getvalue().splitlines()
    assert line == (
        "validation at step 3: openai/gsm8k mean reward of 4 0.250 (best@4 0.500, maj@4 0.375)  sums accuracy 1.000"
    )
    assert "gsm8k" not in step


def test_without_console_in_the_logger_only_what_matters_is_said():
    out = io.StringIO()
    with Console(total_steps=4, steps=False, stream=out) as console:
        console.step(1, METRICS)
        console.fault("replica 0 died")
    assert out.getvalue() == "fault: replica 0 died\n"


def test_summary_names_the_change_and_the_folder():
    out = io.StringIO()
    with Console(total_steps=4, stream=out) as console:
        console.summary(
            {"val-core/sums/acc/mean@1": 0.42},
            {"val-core/sums/acc/mean@1": 0.78, "val-core/new/acc/mean@1": 0.1},
            "checkpoints/p/e",
            100.0,
        )
    lines = out.getvalue().splitlines()
    assert lines[0] == "sums accuracy: 0.420 before, 0.780 after training"
    assert lines[1] == "finished in 0 s; metrics, timeline, samples, checkpoints: checkpoints/p/e"


def test_summary_of_a_resumed_run_counts_all_its_steps():
    out = io.StringIO()
    with Console(total_steps=4, start_step=2, stream=out) as console:
        console.summary({}, {}, "run", 83.4)
    assert out.getvalue() == (
        "finished in 0 s since step 2; all 4 steps took 83 s; metrics, timeline, samples, checkpoints: run\n"
    )
