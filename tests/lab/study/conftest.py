"""One study that was really run, for all tests that read its records."""

import random
import time

import pytest
from studies import TINY, context, ended, study_process

from once import made_once

KILLS = 1


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of the tiny study."""
    return made_once(tmp_path_factory, "tiny-study", make) / "tiny"


def make(folder):
    """Run the study; it is killed at a random moment and resumed."""
    file, out, log = folder / "tiny.toml", folder / "tiny", folder / "log"
    file.write_text(TINY)
    chance = random.Random(3)
    for _ in range(KILLS):
        process = context().Process(target=study_process, args=(file, out, log, 2))
        process.start()
        before = ended(out)
        while process.is_alive() and ended(out) <= before:
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 0.3))
        assert process.is_alive(), log.read_text()
        process.kill()
        process.join()
    process = context().Process(target=study_process, args=(file, out, log, 2))
    process.start()
    process.join()
    assert process.exitcode == 0, log.read_text()
