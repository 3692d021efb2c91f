"""A study's runs have the settings that its layers give them."""

from bacr_study.study_file import read_study
from study_world import STUDY, planned, write_study


def test_an_arm_wins_over_the_study_and_the_study_over_the_task(tmp_path):
    text = STUDY.replace("loss.entropy_coef: 0.0", "optimizer.learning_rate: 3.0e-4")
    text = text.replace("config: [base.yaml], budgets: [8, 64]", TASK)
    study = read_study(write_study(tmp_path, text))
    rates = [study.config_of("plain", arm, {}).optimizer.learning_rate for arm in ("grpo", "bacr")]
    assert rates == [1e-4, 3e-4]
    assert study.config_of("plain", "bacr", {"optimizer.learning_rate": 0.5}).optimizer == (
        study.config_of("plain", "bacr", {"optimizer.learning_rate": 0.5}).optimizer
    )
    varied = study.config_of("plain", "bacr", {"optimizer.learning_rate": 0.5})
    assert varied.optimizer.learning_rate == 0.5


TASK = "config: [base.yaml], set: {optimizer.learning_rate: 9.0}, budgets: [8, 64]"


def test_a_sweep_may_vary_one_key_or_several(tmp_path):
    one = "  bacr: {label: BACR, sweep: {key: curriculum.alpha, values: [0.1, 0.2]}}"
    text = STUDY.replace("  bacr: {label: BACR, set: {loss.entropy_coef: 0.0}}", one)
    _, runs, _ = planned(tmp_path, "seeds=[0]", text=text)
    assert [run.id for run in runs] == ["plain.grpo.0", "plain.bacr.0.1.0", "plain.bacr.0.2.0"]
    assert [run.config.curriculum.alpha for run in runs[1:]] == [0.1, 0.2]
    named = one.replace("[0.1, 0.2]", "{a: {curriculum.alpha: 0.3, curriculum.beta: 0.2}, b: {}}")
    text = STUDY.replace("  bacr: {label: BACR, set: {loss.entropy_coef: 0.0}}", named)
    _, runs, _ = planned(tmp_path, "seeds=[0]", text=text)
    assert [run.id for run in runs][1:] == ["plain.bacr.a.0", "plain.bacr.b.0"]
    assert [run.config.curriculum.alpha for run in runs[1:]] == [0.3, 0.6]


def test_keys_of_one_arm_at_one_size_win_over_its_own(tmp_path):
    text = STUDY.replace(
        "seeds: [0, 1]", "seeds: [0, 1]\n    own: {grpo: {optimizer.learning_rate: 0.5}}"
    )
    study = read_study(write_study(tmp_path, text))
    rates = {a: study.config_of("plain", a, {}).optimizer.learning_rate for a in ("grpo", "bacr")}
    assert rates["grpo"] == 0.5 != rates["bacr"]
