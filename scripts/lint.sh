#!/bin/sh
# lint.sh - clang-format and clang-tidy over the C sources, ruff over the Python files, codespell over all;
# and whether the committed kernels are those of their source (ptx.sh).
#
#   scripts/lint.sh          print what they find; fails if they find anything
#   scripts/lint.sh --fix    mend the formatting of the C sources
set -eu
cd "$(dirname "$0")/.."
sources() { git ls-files --cached --others --exclude-standard "$@"; }

if [ "${1:-}" = --fix ]; then
    sources '*.c' '*.h' | xargs clang-format -i --style=file
    exit
fi
status=0
build/lint/bin/ruff check --quiet --no-cache . || status=1
build/lint/bin/codespell || status=1
scripts/ptx.sh --check || status=1
sources '*.c' '*.h' | xargs clang-format --dry-run --Werror --style=file || status=1
# clang-tidy reads what Meson wrote, less the option that clang rejects; GCC's others that it lacks are no finding.
commands=$(mktemp -d)
trap 'rm -rf "$commands"' EXIT
sed 's/ -mmemset-strategy=[^ "]*//g' build/meson/compile_commands.json >"$commands/compile_commands.json"
sources 'src/*.c' ':!*_test.c' | xargs -n 8 -P "$(nproc)" clang-tidy -p "$commands" --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument 2>/dev/null || status=1
exit $status
