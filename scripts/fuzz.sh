#!/bin/sh
# fuzz.sh - run the fuzzers, each for a while, with ASan and UBSan, as many at once as there are processors.
#
#   scripts/fuzz.sh SECONDS [NAME...]
#
# New inputs that reach new code are kept in build/fuzz-corpus/NAME, one that breaks something is left in
# build/fuzz-finds/ and belongs, once mended, into fuzz/corpus/NAME.  Prints TAP.
set -eu
cd "$(dirname "$0")/.."

one() {
    mkdir -p "build/fuzz-corpus/$2"
    if UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "build/fuzz/fuzz/fuzz_$2" -max_total_time="$1" \
        -timeout=10 -print_final_stats=1 -artifact_prefix="build/fuzz-finds/$2-" \
        "build/fuzz-corpus/$2" "fuzz/corpus/$2" >"build/fuzz-$2.log" 2>&1
    then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz-$2.log")
        new=$(sed -n 's/^stat::new_units_added: *//p' "build/fuzz-$2.log")
        echo "ok - $2: $1 s, $runs inputs, $new of them new"
    else
        echo "not ok - $2: build/fuzz-$2.log has $(grep -m 1 -E 'ERROR:|runtime error:' "build/fuzz-$2.log")"
        return 1
    fi
}

if [ "$1" = --one ]; then
    one "$2" "$3"
    exit
fi
seconds=$1
shift
CC=clang scripts/build.sh fuzz -Dfuzz=true -Dbuildtype=debugoptimized -Db_lundef=false \
    -Db_sanitize=address,undefined -Dc_args=-fsanitize=fuzzer-no-link -- fuzzers
mkdir -p build/fuzz-finds
if [ $# = 0 ]; then
    for program in build/fuzz/fuzz/fuzz_*; do
        [ -d "$program" ] || set -- "$@" "${program##*/fuzz_}"
    done
fi
echo "1..$#"
printf '%s\n' "$@" | xargs -P "$(nproc)" -I NAME scripts/fuzz.sh --one "$seconds" NAME
