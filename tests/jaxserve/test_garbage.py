"""What lasts is left out of garbage collections, and is collected once it has been replaced."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from jaxserve.garbage import lasting_objects_replaced, spare_lasting_objects

class Ring:  # garbage that only a collection finds
    def __init__(self):
        self.own = self

def new():
    ring = Ring()
    return [ring], weakref.ref(ring)

"""


def _printed(program: str) -> str:
    found = subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_present_objects_are_left_out_and_new_ones_are_collected() -> None:
    program = """
lasting, _ = new()
spare_lasting_objects()
later, reference = new()
is_looked_at = any(one is lasting for one in gc.get_objects())
later.clear()
gc.collect()
print(is_looked_at, reference(), gc.get_threshold()[0])
"""
    assert _printed(program) == "False None 10000"


def test_garbage_of_the_start_is_collected_before() -> None:
    program = """
first, reference = new()
first.clear()
spare_lasting_objects()
print(reference())
"""
    assert _printed(program) == "None"


def test_what_was_replaced_is_collected_and_the_rest_left_out_again() -> None:
    program = """
lasting, reference = new()
spare_lasting_objects()
try:
    with lasting_objects_replaced():
        lasting.clear()
        raise ValueError
except ValueError:
    print(reference(), any(one is lasting for one in gc.get_objects()))
"""
    assert _printed(program) == "None False"
