"""Print the last lines of `make coverage`: the line and branch coverage of each package."""

import collections
import json
import pathlib

FIELDS = {"lines": ("covered_lines", "num_statements"), "branches": ("covered_branches", "num_branches")}


def main() -> None:
    files = json.loads(pathlib.Path("build/coverage/coverage.json").read_text())["files"]
    sums: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, file in files.items():
        path = pathlib.PurePath(name)
        package = path.parts[path.parts[0] == "benchmarks"]
        sums[package].update({field: file["summary"][field] for pair in FIELDS.values() for field in pair})
    for package, found in [*sorted(sums.items()), ("both", sum(sums.values(), collections.Counter()))]:
        shares = (f"{100 * found[of] / found[among]:.2f}% of {found[among]:,} {n}" for n, (of, among) in FIELDS.items())
        print(f"{package:18} {', '.join(shares)}")
    print("Details: build/coverage/html/index.html")


if __name__ == "__main__":
    main()
