# The front door.  Meson does the work; scripts/setup.sh first installs what a target lacks on this machine.
#
#   make            build into build/; everything runs from there (build/bin/tally, PYTHONPATH=build/python)
#   make demo       train a network with 4 workers and 2 tallyd on this machine
#   make test       the tests; ends with "N passed, N failed".  SUITES="unit cli" runs only those
#                   ONE=FILE[::NAME] runs one file or test: ONE=test/python/test_ops.py::test_sum, ONE=src/base/heap_test.c
#   make test-all   also the long ones: more of each kind, more steps, a minute for each fuzzer
#   make bench      measure; ARGS="--quick --json FILE" goes to the benchmarks
#   make install    into PREFIX (/usr/local), below DESTDIR
#   make clean      remove what was built; build/venv stays
#   make asan, make ubsan, make tsan    the C tests under a sanitizer
#   make lint       formatting, static checks, spelling;  make format mends the formatting
#   make test-rdma  RDMA: the tests of verbs on a card that is not there, and on Linux's Soft-RoCE in a virtual machine
#   make fuzz       each fuzzer for SECONDS (60)
#   make chaos      SEEDS (100) jobs to which random things happen, and all tests of faults and of cards that change
#
# LONG=3/8 has `make test` run the third of eight parts of the long tests, the C tests under TSan and lint, too.
# PYTHON names the interpreter to start from, VERBOSE=1 shows the compiler's command lines.

PREFIX ?= /usr/local
DESTDIR ?=
SECONDS ?= 60
SEEDS ?= 100
LONG ?= none
export PYTHON VERBOSE

setup = scripts/setup.sh
build = scripts/build.sh meson -Dprefix=$(PREFIX)
venv = build/venv/bin/python
data = /usr/share/datasets/fashion-mnist

.PHONY: all demo test test-all test-rdma bench install clean asan ubsan tsan lint format fuzz chaos help
.NOTPARALLEL:

all:
	@$(setup) build
	@$(build)

demo:
	@$(setup) demo
	@$(build)
	@PYTHONPATH=build/python build/bin/tally run -n 4 -k 2 -- $(venv) examples/demo.py --data $(data) $(ARGS)

test:
	@$(setup) test
	@$(build)
	@$(venv) scripts/run_tests --long=$(LONG) $(if $(ONE),--one '$(ONE)',$(SUITES))

test-all:
	@$(MAKE) test LONG=all

test-rdma:
	@$(setup) test
	@$(build)
	@$(venv) scripts/run_tests rdma soft_roce

bench:
	@$(setup) bench
	@$(build)
	@PYTHONPATH=build/python $(venv) bench/run $(ARGS)

install: all
	@DESTDIR=$(DESTDIR) $(build) -- install
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

clean:
	@if [ -d build ]; then find build -mindepth 1 -maxdepth 1 ! -name venv -exec rm -rf {} +; fi

asan ubsan tsan:
	@$(setup) test
	@$(build)
	@$(venv) scripts/run_tests --long=all $@

lint:
	@$(setup) lint
	@$(build)
	@scripts/lint.sh

format:
	@$(setup) lint
	@scripts/lint.sh --fix

fuzz:
	@$(setup) fuzz
	@scripts/fuzz.sh $(SECONDS) $(FUZZERS)

chaos:
	@$(setup) test
	@$(build)
	@cd test && TALLY_CHAOS=$(SEEDS) ../$(venv) -m pytest -q -p no:cacheprovider --long=all model fault lab/test_adapt.py
	@$(venv) test/fault/chaos.py --seeds $(SEEDS) $(ARGS)

help:
	@sed -n '/^#   make/s/^#   //p' Makefile
