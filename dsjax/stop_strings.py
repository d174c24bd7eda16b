"""Finds stop strings in a stream of characters, in constant time a character.  [no jax]

An Aho-Corasick automaton: a state is the longest end of the text so far that begins some stop string. That makes the
text to hold back exactly as long as the state is deep.
"""

from __future__ import annotations

from functools import lru_cache


class StopAutomaton:
    """All stop strings of a request; immutable, so requests share it. State 0 is the start.

    `match[s]` is the stop string complete in state s, or None: of several that end at one character the longest,
    which is the one that starts first. `hold[s]` is how many of the last characters may still become a match.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._next: list[dict[str, int]] = [{}]
        depth = [0]
        self.match: list[str | None] = [None]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    depth.append(depth[state] + 1)
                    self.match.append(None)
                state = self._next[state][char]
            self.match[state] = stop
        self._fail = [0] * len(self._next)
        self.hold = [0] * len(self._next)
        queue = [0]
        for state in queue:  # breadth first, so the failure state is finished before it is needed
            for char, child in self._next[state].items():
                queue.append(child)
                fail = self._fail[child] = self.step(self._fail[state], char) if state else 0
                if self.match[child] is None:
                    self.match[child] = self.match[fail]
                # a complete stop that nothing continues need not be held itself once it has been let pass
                self.hold[child] = depth[child] if self._next[child] else self.hold[fail]

    def step(self, state: int, char: str) -> int:
        """State after one more character."""
        while True:
            child = self._next[state].get(char)
            if child is not None:
                return child
            if state == 0:
                return 0
            state = self._fail[state]


@lru_cache(maxsize=64)  # the n sequences of a request, and users who always send the same stops
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)
