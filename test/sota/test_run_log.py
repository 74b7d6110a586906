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
