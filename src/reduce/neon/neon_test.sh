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
flags="$flags -DTLY_FAR_BYTES=262144" # large rows take most of an emulator's time
compile() { # from src/reduce, with options: through ccache, where there is one
    source=$1
    shift
    $(command -v ccache) $cc $flags "$@" -c "src/reduce/$source.c" -o "$out/$source.o"
}
compile fold_vector -O1 -DTLY_FOLD=tly_fold_neon -DTLY_VECTOR=16
compile norm_vector -DTLY_NORM=tly_norm_neon -DTLY_VECTOR=16
compile codec_vector -DTLY_PEAK=tly_code_peak_neon -DTLY_PACK=tly_code_pack_neon -DTLY_SPLIT=tly_code_split_neon -DTLY_VECTOR=16
for source in fold_scalar reduce codec; do
    compile $source
done
for name in reduce nodes norms reduce_pairs codec; do
    compile ${name}_test -DTLY_SAMPLE=2047
    $cc -static -o "$out/run" "$out"/fold_vector.o "$out"/norm_vector.o "$out"/codec_vector.o "$out"/fold_scalar.o "$out"/reduce.o "$out"/codec.o \
        "$out/${name}_test.o" -lm
    qemu-aarch64 "$out/run"
done
