"""What a run prints, and what it writes into its log."""

import logging

from torchrl_agents.run_log import RunLog


def test_what_died_is_shown_and_other_warnings_of_libraries_are_written(tmp_path, capsys):
    with RunLog(tmp_path / "run.log"):
        logging.getLogger("collectors.cluster.supervisor").warning("collector 0 is gone")
        logging.getLogger("collectors.cluster.supervisor").info("collector 1 serves")
        logging.getLogger("torchrl_data.rows").warning("a setting is deprecated")
    logging.getLogger("collectors.cluster.supervisor").warning("after the run")
    shown, written = capsys.readouterr().err, (tmp_path / "run.log").read_text()
    assert shown.splitlines()[0] == "collector 0 is gone"
    assert "deprecated" not in shown
    assert [line.partition(" WARNING ")[2] for line in written.splitlines()] == [
        "collector 0 is gone",
        "a setting is deprecated",
    ]


def test_a_step_says_how_many_of_its_rollouts_failed(tmp_path, capsys):
    with RunLog(tmp_path / "run.log") as log:
        done = log.steps("grpo", 3)
        done(1, {"reward": 0.5, "reward/error_fraction": 0.0})
        done(2, {"reward": 0.5, "reward/error_fraction": 0.25})
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "grpo step 1/3  reward 0.500"
    assert second.startswith("grpo step 2/3  reward 0.500  failed 0.25  (")
