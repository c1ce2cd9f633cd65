#!/bin/sh
# setup.sh - install what a target of the Makefile needs and this machine lacks.
#
#   scripts/setup.sh build | test | demo | bench | lint | fuzz | rdma
#
# Two kinds of things: Debian packages, and build/venv, a virtual environment with PyTorch.  Nothing is done
# where nothing lacks.  Where this user may not install, it prints the one command that does, and fails.
#
# build/venv/bin/python is the Python of all targets.  If the python3 in PATH (PYTHON names another) has
# PyTorch 2.1 or later, then build/venv only looks into that environment, which itself is never changed, and
# adds what it lacks; else PyTorch is installed into build/venv at the version of requirements-torch.txt.  `test` adds
# the frameworks of requirements-frameworks.txt.
#
# build/lint is a small environment with ruff and codespell (requirements-lint.txt), for `lint` and `test`.
set -eu
cd "$(dirname "$0")/.."
venv=$PWD/build/venv
target=${1:-build}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# --- Debian packages -----------------------------------------------------------------------------

build="libc6-dev meson ninja-build pkg-config libsodium-dev libhwloc-dev libxxhash-dev"
python=yes
case $target in
build) packages=$build python=no ;;
# The arm64 compiler and emulator are for the NEON sums.
test) packages="$build libcmocka-dev iproute2 nftables spin gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" ;;
demo) packages="$build dataset-fashion-mnist" ;;
bench) packages="$build iproute2 libopenmpi-dev dataset-fashion-mnist" ;;
lint) packages="$build libcmocka-dev clang clang-format clang-tidy" python=no ;; # clang: for the kernels (ptx.sh)
# For a virtual machine with Soft-RoCE (test/rdma/run_rxe_vm.sh).
rdma) packages="qemu-system-x86 busybox-static ibverbs-providers iproute2" python=no ;;
fuzz) packages="$build clang llvm libclang-rt-14-dev" python=no ;;
*) fail "unknown target '$target'; there are build, test, demo, bench, lint, fuzz and rdma" ;;
esac

# A build/venv that is in PATH is ours, not the environment to look into.
PATH=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$venv/bin" | paste -sd:)
base=${PYTHON:-python3}
{ [ "$python" = no ] && [ "$target" != lint ]; } || "$base" -c '' || fail "cannot run '$base'; set PYTHON to a Python 3 interpreter"
if { [ "$python" = yes ] || [ "$target" = lint ]; } && ! "$base" -c 'import ensurepip' 2>/dev/null; then
    packages="$packages python3-venv"
fi

installed() { dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

lacking() {
    for p in $packages; do
        installed "$p" || printf '%s ' "$p"
    done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

# The lock's time-out covers dpkg; apt-get update's own lock on the lists has none, hence the loop.
apt() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600 \
        -o Dpkg::Use-Pty=0 "$@" >>build/setup.log 2>&1 </dev/null
}

update_lists() {
    say "fetching the package lists (apt-get update)"
    for pause in 5 10 20 0; do
        if apt update; then
            return
        fi
        sleep $pause
    done
    say "apt-get update failed; trying with the lists as they are"
}

# Are the lists on this machine good enough to know all of "$@"?
listed() {
    for p in "$@"; do
        apt-cache policy "$p" 2>/dev/null | grep -q 'Candidate: [^(]' || return 1
    done
}

install_packages() {
    if ! command -v dpkg-query >/dev/null; then
        for tool in meson ninja pkg-config; do
            command -v $tool >/dev/null || fail "this is not Debian, and $tool lacks; wanted, by Debian's names: $packages"
        done
        say "this is not Debian: taking for granted what corresponds to $packages"
        return
    fi
    lack=$(lacking)
    [ -n "$lack" ] || return 0
    by_hand="sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends ${lack% }'"
    if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
        fail "these Debian packages lack, and this user may not install them.  Run
    $by_hand"
    fi
    # shellcheck disable=SC2086 # a list of words
    listed $lack || update_lists
    say "installing Debian packages: $lack"
    # shellcheck disable=SC2086
    if ! apt install --no-install-recommends $lack; then
        update_lists # lists that are old name files that are gone
        # shellcheck disable=SC2086
        if ! apt install --no-install-recommends $lack; then
            tail -n 20 build/setup.log >&2
            fail "apt-get failed (all of it is in build/setup.log).  The command was
    $by_hand"
        fi
    fi
}

# --- build/venv ----------------------------------------------------------------------------------

# The environment's PyTorch if it is 2.1 or later: "version" and the folders to look into, a line each.
active_torch() {
    "$base" - <<'PY' 2>/dev/null
import importlib.metadata, re, site, sys
version = importlib.metadata.version("torch")
if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 1):
    sys.exit(1)
print(version)
folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
print("\n".join(folders))
PY
}

pip_install() {
    if ! "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "$@" >>build/setup.log 2>&1; then
        tail -n 20 build/setup.log >&2
        fail "pip failed (all of it is in build/setup.log).  The command was
    $venv/bin/python -m pip install $*"
    fi
}

# Which lines of requirements.txt name a distribution that build/venv does not see?
lacking_modules() {
    "$venv/bin/python" - <<'PY'
import importlib.metadata as m
for line in open("requirements.txt"):
    line = line.split("#")[0].strip()
    if line:
        try:
            m.version(line.split("=")[0])
        except m.PackageNotFoundError:
            print(line)
PY
}

make_venv() {
    active=$(active_torch) || active=
    # What it was made from; anything else makes it anew.
    stamp=$({
        "$base" -c 'import sys; print(sys.version, sys.prefix)'
        printf '%s\n' "$active"
        cat requirements-torch.txt requirements.txt
    } | cksum)
    if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; then
        return
    fi
    rm -rf "$venv"
    say "creating build/venv with $("$base" -c 'import sys; print(sys.executable)')"
    "$base" -m venv "$venv" >>build/setup.log 2>&1 ||
        fail "'$base -m venv' failed (see build/setup.log): $base has no working venv and ensurepip"
    if [ -n "$active" ]; then
        say "using PyTorch $(printf '%s\n' "$active" | head -n 1) of the environment at $("$base" -c 'import sys; print(sys.prefix)')"
        printf '%s\n' "$active" | tail -n +2 >"$(echo "$venv"/lib/python3*/site-packages)/environment.pth"
        lack=$(lacking_modules | paste -sd' ')
        if [ -n "$lack" ]; then
            say "installing into build/venv what that environment lacks: $lack"
            # shellcheck disable=SC2086
            pip_install $lack
        fi
    else
        say "installing into build/venv: $(sed '/^#/d' requirements-torch.txt) (large; once)"
        # Named here rather than by -r, so that local files of PyTorch are found as for any `pip install`.
        pip_install "$(sed '/^#/d' requirements-torch.txt)"
        say "installing into build/venv: $(sed '/^#/d' requirements.txt | paste -sd' ')"
        pip_install -r requirements.txt
    fi
    printf '%s\n' "$stamp" >"$venv/stamp"
}

# The frameworks that tests are run with.  Where they cannot be had their tests are skipped.
install_frameworks() {
    wanted=$(cat "$venv/stamp" requirements-frameworks.txt | cksum)
    [ "$(cat "$venv/frameworks" 2>/dev/null)" != "$wanted" ] || return 0
    say "installing into build/venv, for tests of frameworks: $(sed '/^#/d' requirements-frameworks.txt | paste -sd' ')"
    "$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$venv/constraint"
    if ! "$venv/bin/python" -m pip --disable-pip-version-check --no-input install -c "$venv/constraint" \
        -r requirements-frameworks.txt >>build/setup.log 2>&1; then
        say "pip failed (see build/setup.log): tests of what lacks are skipped"
    fi
    printf '%s\n' "$wanted" >"$venv/frameworks"
}

# $1: what to do where they cannot be had.
make_lint() {
    wanted=$({ "$base" -c 'import sys; print(sys.version, sys.prefix)'; cat requirements-lint.txt; } | cksum)
    [ "$(cat build/lint/stamp 2>/dev/null)" != "$wanted" ] || return 0
    rm -rf build/lint
    say "installing into build/lint: $(sed '/^#/d' requirements-lint.txt | paste -sd' ')"
    if "$base" -m venv build/lint >>build/setup.log 2>&1 &&
        build/lint/bin/python -m pip --disable-pip-version-check --no-input install -r requirements-lint.txt \
            >>build/setup.log 2>&1; then
        printf '%s\n' "$wanted" >build/lint/stamp
    else
        "$1" "no ruff and codespell in build/lint (see build/setup.log)"
    fi
}

mkdir -p build
install_packages
[ "$python" = no ] || make_venv
[ "$target" != test ] || install_frameworks
case $target in
lint) make_lint fail ;;
test) make_lint say ;; # their checks are skipped then
esac
