"""`python -m tests.fuzz`: rounds of all fuzzers in turn, for so many minutes."""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections import defaultdict

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.rounds import Ended, run_round


def main(words: list[str] | None = None, registry: str = "tests.fuzz.registry") -> int:
    """The exit code: 1 if an example has broken a promise. The fuzzers are those of the module `registry`."""
    fuzzers: dict[str, Fuzzer] = importlib.import_module(registry).FUZZERS
    asked = _asked(words, list(fuzzers))
    names = asked.names or list(fuzzers)
    draws = random.Random(asked.seed)
    print(f"seed {asked.seed}: {', '.join(names)}", flush=True)
    found: dict[str, list[Ended]] = defaultdict(list)
    end = time.monotonic() + 60 * asked.minutes
    rounds = 0
    while True:
        for name in names:
            number = asked.seed if asked.repeat else draws.randrange(2**32)
            ended = run_round(registry, name, number, asked.examples or fuzzers[name].per_round)
            found[name].append(ended)
            print(f"{name:12} seed {number:10} {ended.examples:5} examples {ended.seconds:6.1f} s", flush=True)
            for failure in ended.failures:
                again = f"python -m tests.fuzz {name} --repeat --seed {number}"
                again += f" --examples {asked.examples}" if asked.examples else ""
                print(f"FAILED {name}: repeat with\n  {again}\n{failure}", flush=True)
            if time.monotonic() > end and rounds:
                return _closing(found)
        rounds += 1
        if asked.repeat or time.monotonic() > end:
            return _closing(found)


def _asked(words: list[str] | None, known: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FUZZER", help=f"{', '.join(known)}; all without a name")
    parser.add_argument("--minutes", type=float, default=2.0, help="rounds begin until then; each fuzzer has one")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--repeat", action="store_true", help="run the one round that --seed is of")
    parser.add_argument("--examples", type=int, help="in a round, in the place of each fuzzer's own number")
    asked = parser.parse_args(words)
    if unknown := set(asked.names) - set(known):
        parser.error(f"no fuzzer is called {', '.join(sorted(unknown))}")
    return asked


def _closing(found: dict[str, list[Ended]]) -> int:
    failures = 0
    for name, rounds in found.items():
        failed = sum(len(each.failures) for each in rounds)
        failures += failed
        examples = sum(each.examples for each in rounds)
        print(f"{name:12} {len(rounds):4} rounds {examples:8,} examples {failed:4} failures")
    total = sum(each.examples for rounds in found.values() for each in rounds)
    print(f"{total:,} examples, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
