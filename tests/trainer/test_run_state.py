import json

from weft.trainer.run_state import RunState


class Counter:
    def __init__(self, count=0):
        self.count = count

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def test_parts_go_on_from_what_was_saved_by_name():
    saved = json.loads(json.dumps(RunState({"a": Counter(3), "gone": Counter(4)}).get_state()))
    a, new = Counter(), Counter(7)
    RunState({"a": a, "new": new, "stateless": print, "none": None}).set_state(saved)
    assert (a.count, new.count) == (3, 7)
