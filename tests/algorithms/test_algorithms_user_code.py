"""A user's own estimators and losses from a file: found, run, and reported with file and line when broken."""

import sys
import textwrap

import jax
import numpy as np
import pytest
from algorithm_cases import assert_close, settings, token_case

from jaxrl_ppo import user_code
from jaxrl_ppo.algorithms import registry
from jaxrl_ppo.algorithms.advantages import AdvantageInputs, advantage_function, find_advantage
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss, find_policy_loss
from jaxrl_ppo.algorithms.trial import try_advantage, try_policy_loss
from jaxrl_ppo.user_code import UserCodeError

GOOD = """
    import jax.numpy as jnp

    from jaxrl_ppo.algorithms.registry import policy_loss

    def scores_as_they_are(inputs, config):
        advantages = inputs.spread(inputs.scores) * config.gamma
        return advantages, advantages

    def mean_square(inputs, config):
        return jnp.square(inputs.log_probs), {"size": jnp.abs(inputs.log_probs)}

    @policy_loss("user_sequence_mean", aggregation="seq-mean-token-mean", needs=("rollout_log_probs",))
    def by_sequence(inputs, config):
        return inputs.sequence_mean(inputs.log_probs), {}

    def choose(old_log_probs, advantages, mask, config, seed):
        return old_log_probs["first"]

    @policy_loss("user_selection", select=choose)
    def chosen_only(inputs, config):
        return inputs.selected * inputs.log_probs, {}
"""


@pytest.fixture
def user_file(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    yield write
    for name in ("user_sequence_mean", "user_selection"):
        registry.POLICY_LOSSES.pop(name, None)


def advantage_inputs():
    rewards = np.arange(6, dtype=np.float32).reshape(2, 3)
    return AdvantageInputs(token_rewards=rewards, mask=np.ones((2, 3), np.float32), group=np.array([0, 0]))


def test_an_estimator_from_a_file_runs(user_file):
    estimator = find_advantage(f"{user_file(GOOD)}:scores_as_they_are")
    advantages, returns = advantage_function(estimator, settings(gamma=0.5))(advantage_inputs())
    assert_close(advantages, [[1.5] * 3, [6.0] * 3], 1e-6)
    assert_close(returns, advantages, 0)


def test_losses_from_a_file_run_plain_or_registered(user_file):
    path = user_file(GOOD)
    case = token_case(0)
    plain = find_policy_loss(f"{path}:mean_square")
    assert (plain.aggregation, plain.needs) == (None, ())
    token_loss, metrics = jax.jit(lambda x: compute_policy_loss(plain, PolicyLossInputs(**(case | x)), settings()))({})
    counted = np.where(case["mask"] > 0, case["log_probs"], 0)
    assert_close(token_loss, counted**2 * case["importance_weights"], 1e-5)
    assert_close(metrics["size"], np.abs(counted), 1e-6)
    registered = find_policy_loss(f"{path}:by_sequence")
    assert (registered.aggregation, registered.needs) == ("seq-mean-token-mean", ("rollout_log_probs",))
    with pytest.raises(UserCodeError, match=r"chosen_only: IndexError: .* \(.*mine\.py, line 18\)"):
        find_policy_loss(f"{path}:chosen_only").select(case["old_log_probs"], None, case["mask"], settings(), 0)


def test_a_relative_path_is_taken_from_the_working_directory(user_file, monkeypatch):
    monkeypatch.chdir(user_file(GOOD).parent)
    assert find_advantage("mine.py:scores_as_they_are").function.__name__ == "scores_as_they_are"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def f(inputs, config):\n    return (\n", "f", r"SyntaxError: .* \(.*mine\.py, line 2\)"),
        ("import os\n\nimport no_such_module\n", "f", r"No module named 'no_such_module' \(.*mine\.py, line 3"),
        ("x = 1\ny = x / 0\n", "f", r"ZeroDivisionError: division by zero \(.*mine\.py, line 2\)"),
        ("def g(a, b): ...\n\ndef f2(a, b): ...\n", "f", r"mine\.py has no 'f'; what it defines: f2, g"),
        ("f = 3\n", "f", r"'f' in .*mine\.py is a int, not a function"),
        ("\n\ndef f(inputs): ...\n", "f", r"f must take 2 positional arguments: .* \(.*mine\.py, line 3\)"),
    ],
)
def test_a_file_that_does_not_load_is_reported_with_its_line(user_file, text, name, message):
    spec = f"{user_file(text)}:{name}"
    loaded = set(sys.modules)
    with pytest.raises(UserCodeError, match=message) as caught:
        find_advantage(spec)
    assert f"algorithm.adv_estimator={spec}: " in str(caught.value)
    assert len(set(sys.modules) - loaded) <= 1


def test_a_missing_file_and_an_unknown_name_are_reported(user_file):
    with pytest.raises(UserCodeError, match=r"adv_estimator=/no/such\.py:f: there is no file /no/such\.py"):
        find_advantage("/no/such.py:f")
    with pytest.raises(UserCodeError, match=r"policy_loss\.loss_mode=vanila: not one of cispo, .*file\.py:name"):
        find_policy_loss("vanila")
    with pytest.raises(UserCodeError, match=r"mine\.txt is not a Python file"):
        find_advantage(f"{user_file('', 'mine.txt')}:f")


def test_an_estimator_that_fails_when_run_is_reported_with_its_line(user_file):
    path = user_file("""
        def helper(inputs):
            return inputs.no_such_field

        def f(inputs, config):
            return helper(inputs), None
    """)
    with pytest.raises(UserCodeError, match=r"AttributeError: .*no_such_field.* \(.*mine\.py, line 3\)"):
        advantage_function(find_advantage(f"{path}:f"), settings())(advantage_inputs())


def test_a_loss_that_fails_or_returns_a_wrong_shape_is_reported(user_file):
    path = user_file("""
        import jax.numpy as jnp

        def fails(inputs, config):
            return inputs.log_probs @ inputs.log_probs, {}

        def aggregates(inputs, config):
            return jnp.mean(inputs.log_probs), {}

        def forgets_metrics(inputs, config):
            return inputs.log_probs
    """)
    inputs = PolicyLossInputs(**token_case(1))

    def run(name):
        compute_policy_loss(find_policy_loss(f"{path}:{name}"), inputs, settings())

    with pytest.raises(UserCodeError, match=r"loss_mode=.*:fails: TypeError: .* \(.*mine\.py, line 5\)"):
        run("fails")
    with pytest.raises(UserCodeError, match=r"the loss has shape \(\), not one value per token, \(12, 9\)"):
        run("aggregates")
    with pytest.raises(UserCodeError, match="must return the loss of each token and a dict of metrics"):
        run("forgets_metrics")


def test_an_estimator_that_returns_a_wrong_shape_or_one_array_is_reported(user_file):
    path = user_file("""
        def per_sample(inputs, config):
            return inputs.scores, inputs.scores

        def one_array(inputs, config):
            return inputs.spread(inputs.scores)
    """)

    def run(name):
        advantage_function(find_advantage(f"{path}:{name}"), settings())(advantage_inputs())

    with pytest.raises(UserCodeError, match=r"per_sample: advantages have shape \(2,\), not \(2, 3\)"):
        run("per_sample")
    with pytest.raises(UserCodeError, match="must return advantages and returns"):
        run("one_array")


def test_a_users_code_is_tried_before_a_run(user_file):
    path = user_file("""
        import jax.numpy as jnp

        from jaxrl_ppo.algorithms.registry import policy_loss

        def good(inputs, config):
            return inputs.spread(inputs.scores), inputs.spread(inputs.scores * inputs.greedy_scores)

        def bad(inputs, config):
            return inputs.scores @ inputs.mask

        @policy_loss("user_selection", select=lambda old, advantages, mask, config, seed: mask > 0)
        def good_loss(inputs, config):
            return inputs.selected * inputs.log_probs, {}

        def bad_loss(inputs, config):
            return inputs.log_probs * config.no_such_setting, {}

        def infinite(inputs, config):
            return inputs.spread(inputs.scores) * jnp.inf, inputs.spread(inputs.scores)
    """)
    try_advantage(find_advantage(f"{path}:good"), settings())
    try_policy_loss(find_policy_loss(f"{path}:good_loss"), settings())
    with pytest.raises(UserCodeError, match="must return advantages and returns"):
        try_advantage(find_advantage(f"{path}:bad"), settings())
    with pytest.raises(UserCodeError, match=r"infinite: advantages are not finite in 4 samples, .*made-up samples"):
        try_advantage(find_advantage(f"{path}:infinite"), settings())
    with pytest.raises(UserCodeError, match=r"AttributeError: .*no_such_setting.* line 17"):
        try_policy_loss(find_policy_loss(f"{path}:bad_loss"), settings())


def test_a_taken_name_is_refused(user_file):
    path = user_file("""
        from jaxrl_ppo.algorithms.registry import advantage

        @advantage("grpo")
        def f(inputs, config): ...
    """)
    with pytest.raises(UserCodeError, match=r"the name 'grpo' is already taken by jaxrl_ppo\..*line 4"):
        find_advantage(f"{path}:f")


def test_a_file_that_takes_long_to_import_is_told_with_its_key(user_file, tmp_path, monkeypatch):
    monkeypatch.setattr(user_code, "SLOW_IMPORT_S", 0.05)
    told = tmp_path / "told"
    monkeypatch.setattr(user_code.log, "warning", told.write_text)
    path = user_file(f"""
        import pathlib, time
        while not (told := pathlib.Path({str(told)!r})).exists() or not told.read_text():
            time.sleep(0.01)
        def mine(inputs, config): return None
    """)
    find_advantage(f"{path}:mine")
    assert told.read_text() == f"still importing, after 0.05 s: {path} (algorithm.adv_estimator={path}:mine)"
