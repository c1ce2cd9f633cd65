#!/bin/sh
# neon_test.sh - cross-compiles this folder with its tests for arm64 and runs them emulated.
# usage: neon_test.sh SOURCE_ROOT.  Exit status 77 (skipped) where the compiler or the emulator lacks.
set -eu
cc=aarch64-linux-gnu-gcc
command -v $cc >/dev/null && command -v qemu-aarch64 >/dev/null || {
    echo "needs $cc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)"
    exit 77
}
cd "$1"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
flags="-std=gnu17 -O2 -D_GNU_SOURCE -Iinclude -Isrc -Isrc/reduce/neon -fno-math-errno -ffp-contract=off -Wall -Werror"
$cc $flags -O1 -DTLY_FOLD=tly_fold_neon -DTLY_VECTOR=16 -c src/reduce/fold_vector.c -o "$out/neon.o"
for name in reduce reduce_pairs; do
    $cc $flags -DTLY_SAMPLE=2047 -static -o "$out/$name" "$out/neon.o" src/reduce/reduce.c src/reduce/fold_scalar.c \
        src/reduce/${name}_test.c -lm
    qemu-aarch64 "$out/$name"
done
