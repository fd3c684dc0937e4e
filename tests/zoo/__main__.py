"""Train all members that are not there yet, and say what each took."""

import time

from tests import zoo


def main() -> None:
    for name in zoo.RECIPES:
        started = time.monotonic()
        folder = zoo.path(name)
        seconds = time.monotonic() - started
        megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(f"{name:16} {seconds:6.1f} s {megabytes:6.2f} MB  {folder}", flush=True)


if __name__ == "__main__":
    main()
