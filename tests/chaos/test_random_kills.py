"""Killed at random moments and resumed, all kinds of tasks: no bit of the result may differ."""

import os
import random
import time

import pytest

from chaos import COUNTS, SEED, asked, cases, ended_in_time, finished, seconds_of, start, wipe

SHARES = {
    "sparse, rewired, FP16, recomputed images": 0.25,
    "plain images": 0.36,
    "text": 0.3,
    "prepared text": 0.08,
    "study": 0.02,
}


def kill(kind, count, tmp_path, first=SEED):
    """So many kills; whenever a run gets to its end it is compared, and begun anew."""
    case = cases(tmp_path)[kind]
    log, whole, killed = tmp_path / "log", tmp_path / "whole", tmp_path / "killed"
    window = seconds_of(case, whole, log)
    chance = random.Random(f"{kind} {first}")
    kills = compared = reached = 0
    while kills < count or not compared:
        process = start(case.arguments(killed), log)
        process.join(chance.uniform(0, window))
        if kills < count and process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            COUNTS[f"kills: {kind}"] += 1
            COUNTS["kills"] += 1
            now = case.reached(killed)
            lost = max(reached - now, 0)
            COUNTS["lost updates"] += lost
            assert not lost, (reached, now)
            window *= (
                1.05 if now == reached else 1.0
            )  # killed before it got on: let others get further
            reached = now
            if kind == "prepared text" and now:  # killed after its last act: nothing is left to do
                case.compare(whole, killed)
                wipe(killed)
                reached = 0
            continue
        if kills < count:  # it came to its end before its time
            window *= 0.8
        assert finished(process, log) == 0, log.read_text()
        case.compare(whole, killed)
        compared += 1
        COUNTS["runs that were killed, resumed to the end and compared to the bit"] += 1
        # A study's runs end by themselves when it is gone, with a snapshot; until then they write.
        if kind == "study":
            assert ended_in_time(os.getpid(), lambda seconds: gone(killed, seconds))
        wipe(killed)
        reached = 0


def gone(folder, seconds):
    """Whether nobody works in a folder, now or a little later."""
    time.sleep(seconds)
    return not still_running(folder)


def still_running(folder):
    """Whether a process works in a folder."""
    for number in filter(str.isdecimal, os.listdir("/proc")):
        try:
            links = [
                os.readlink(f"/proc/{number}/fd/{n}") for n in os.listdir(f"/proc/{number}/fd")
            ]
        except OSError:
            continue
        if int(number) != os.getpid() and any(link.startswith(str(folder)) for link in links):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARES)
def test_many_kills(kind, tmp_path):
    kill(kind, max(1, round(SHARES[kind] * asked("KILLS", 12))), tmp_path)
