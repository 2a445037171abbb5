"""Numbers in all and by name."""

from jaxserve.server.tally import Tally


def test_names_that_have_nothing_left_are_forgotten() -> None:
    tally = Tally()
    tally.add("a", 2)
    tally.add("b", 3)
    tally.add("a", -1)
    assert (tally.total, tally["a"], tally["b"], tally["c"]) == (4, 1, 3, 0)
    tally.add("a", -1)
    assert (tally.total, [*tally.names]) == (3, ["b"])
