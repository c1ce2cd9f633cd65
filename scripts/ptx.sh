#!/bin/sh
# ptx.sh - make src/device/sums_ptx.inc, the kernels of src/device/sums.c for NVIDIA's GPUs, by Clang.
#
#   scripts/ptx.sh           make it anew
#   scripts/ptx.sh --check   fail if the sources give something else; says so and passes where this Clang is not the one that
#                            made it, because each version has other instructions
#
# The PTX is that of the oldest architecture which drivers of today load; they translate it to their GPU's.
set -eu
cd "$(dirname "$0")/.."
made=src/device/sums_ptx.inc
version=$(clang --version | sed -n 's/.*version \([0-9]*\).*/\1/p;q')
if [ "${1:-}" = --check ] && ! head -n 1 $made | grep -qF "clang $version,"; then
    echo "ptx: not compared, because this is clang $version; $(head -n 1 $made)"
    exit
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
clang -x cuda --cuda-device-only --cuda-gpu-arch=sm_52 -nocudainc -nocudalib -Wno-unknown-cuda-version -std=gnu++17 -O3 \
    -ffp-contract=off -Iinclude -Isrc -S -o "$dir/ptx" src/device/sums.c
# Without ".rn" a driver may join a product and a sum, which then is rounded once.  ".ftz" would lose subnormals.
if grep -E '(add|sub|mul|div|fma|mad)\.(ftz|approx|full|sat|f32|f64)|\.ftz' "$dir/ptx"; then
    echo "ptx: these instructions do not round as IEEE 754 says" >&2
    exit 1
fi
{
    echo "/* Made by scripts/ptx.sh with clang $version, from sums.c. */"
    sed -e '/^[[:space:]]*\/\//d; /^$/d' -e 's/.*/"&\\n"/; s/\t/\\t/g' "$dir/ptx"
} >"$dir/inc"
if [ "${1:-}" = --check ]; then
    cmp "$dir/inc" $made || { echo "ptx: $made is older than its sources; run scripts/ptx.sh" >&2; exit 1; }
else
    cp "$dir/inc" $made
fi
