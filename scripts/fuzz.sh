#!/bin/sh
# fuzz.sh - run the fuzzers, each for a while, with ASan and UBSan.
#
#   scripts/fuzz.sh SECONDS [NAME...]
#
# New inputs that reach new code are kept in build/fuzz-corpus/NAME, one that breaks something is left in
# build/fuzz-finds/ and belongs, once mended, into fuzz/corpus/NAME.
set -eu
cd "$(dirname "$0")/.."
seconds=$1
shift
CC=clang scripts/build.sh fuzz -Dfuzz=true -Dbuildtype=debugoptimized -Db_lundef=false \
    -Db_sanitize=address,undefined -Dc_args=-fsanitize=fuzzer-no-link -- fuzzers
mkdir -p build/fuzz-finds
status=0
if [ $# = 0 ]; then
    for program in build/fuzz/fuzz/fuzz_*; do
        [ -d "$program" ] || set -- "$@" "${program##*/fuzz_}"
    done
fi
for name in "$@"; do
    mkdir -p "build/fuzz-corpus/$name"
    echo "fuzz: $name for $seconds s"
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "build/fuzz/fuzz/fuzz_$name" -max_total_time="$seconds" \
        -timeout=10 -print_final_stats=1 -artifact_prefix="build/fuzz-finds/$name-" \
        "build/fuzz-corpus/$name" "fuzz/corpus/$name" >"build/fuzz-$name.log" 2>&1 || {
        status=1
        tail -n 60 "build/fuzz-$name.log"
    }
    grep -E 'stat::(number_of_executed_units|new_units_added)' "build/fuzz-$name.log" || true
done
exit $status
