#!/bin/sh
# build.sh - configure and build into a folder, then lay out what runs in place.
#
#   scripts/build.sh NAME [meson options] [-- ninja's targets]
#
# Builds into build/NAME.  NAME `meson` is the build that everything uses; from it come, as links,
#   build/bin/tally, build/bin/tallyd    the programs
#   build/lib/libtally.so                the library, where build/python/tally looks for it, and libtally_mpi.so
#   build/python                         the Python package, the backend's entry point and the metadata that names it
# The others (asan, ubsan, tsan, fuzz) are for their own tests alone.
set -eu
cd "$(dirname "$0")/.."
name=$1
shift
options=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options="$options $1"
    shift
done
[ $# = 0 ] || shift
dir=build/$name

# Debian's own come first: in PATH there may be a version manager's shims for a Python without meson.
tool() {
    if [ -x "/usr/bin/$1" ]; then
        echo "/usr/bin/$1"
    else
        command -v "$1" || { echo "build: there is no $1; run scripts/setup.sh" >&2; exit 1; }
    fi
}
meson=$(tool meson)
NINJA=$(tool ninja)
export NINJA

# The unit tests are built where their library is: setup.sh brings it for `make test`, not for `make`.
if pkg-config --exists cmocka; then
    options="-Dtests=enabled $options"
fi

run_meson() {
    mkdir -p build
    if ! "$meson" "$@" "$dir" >"build/$name-setup.log" 2>&1; then
        cat "build/$name-setup.log" >&2
        exit 1
    fi
    printf '%s\n' "$options" >"$dir/options"
}
# shellcheck disable=SC2086 # options are words
if ! [ -f "$dir/build.ninja" ]; then
    rm -rf "$dir"
    run_meson setup $options
elif [ "$(cat "$dir/options" 2>/dev/null)" != "$options" ]; then
    run_meson configure $options
elif [ -n "$(find . -path ./build -prune -o -name meson.build -newer "$dir/build.ninja" -print)" ]; then
    run_meson setup --reconfigure # Ninja sees those change that it knows, but not a new one
fi

log=build/$name-build.log
if [ -n "${VERBOSE:-}" ]; then
    "$NINJA" -C "$dir" -v "$@"
elif "$NINJA" -C "$dir" "$@" >"$log" 2>&1; then
    grep -A 6 -F 'warning:' "$log" || true
else
    cat "$log" >&2
    exit 1
fi

if [ "$name" = meson ]; then
    mkdir -p build/bin build/lib build/python
    ln -sfn ../meson/src/cli/tally build/bin/tally
    ln -sfn ../meson/src/tallyd/tallyd build/bin/tallyd
    ln -sfn ../meson/libtally.so build/lib/libtally.so
    ln -sfn ../meson/libtally.so.0 build/lib/libtally.so.0
    ln -sfn ../meson/src/mpi/libtally_mpi.so build/lib/libtally_mpi.so
    ln -sfn ../../python/tally build/python/tally
    ln -sfn ../../python/tally_autoload.py build/python/tally_autoload.py
    ln -sfn ../meson/python build/python/tally.dist-info
fi
