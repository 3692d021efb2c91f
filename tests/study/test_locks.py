"""Locks that are waited for: one process at a time, in whichever order they come."""

import threading

from bacr_study.locks import lock_when_free


def test_a_lock_is_had_when_it_is_free_and_not_before(tmp_path, capsys):
    path, had = tmp_path / "made" / "a.lock", []
    with lock_when_free(path):
        other = threading.Thread(target=lambda: had.append(lock_when_free(path)))
        other.start()
        other.join(0.2)
        assert other.is_alive() and had == []
    other.join(20)
    had[0].close()
    assert capsys.readouterr().err == f"waiting for the process that holds {path}\n"
    lock_when_free(path).close()
    assert capsys.readouterr().err == ""
