# Two commands: `make demo` and `make test`. Each does all of its set-up; a
# second run costs nothing. `make extras` adds what only some tests need.
.PHONY: help demo test test-newest check extras build programs setup install package architecture clean
.DEFAULT_GOAL := help

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
NEWEST = 2.15.0

help:
	@echo "make demo     train a small GPT and digits on one device and in five kinds of parallelism, and write a page for each"
	@echo "make test     build everything and run every test"
	@echo "make test-newest   the same with LibTorch $(NEWEST), in build-$(NEWEST)/"
	@echo "make check    format, spelling, folders, headers, pickles, clang-tidy: what holds for the whole tree"
	@echo "make extras   set up what only some tests need: Python's PyTorch, Chromium, mpirun, clang"
	@echo "make programs build the programs and the examples into build/bin/"
	@echo "make build    build everything, with tests and benchmarks"
	@echo "make install  install programs, manual pages, completions and the CMake package under PREFIX=$(PREFIX)"
	@echo "make package  make a tarball that runs on Debian 12; the Dockerfile builds from it"

setup:
	@setup/packages.sh

build: setup
	@setup/build.sh $(JOBS)

programs: setup
	@setup/build.sh $(JOBS) echelon/all examples/all

demo: setup
	@setup/build.sh $(JOBS) echelon echelon-train
	@setup/demo.sh

check: setup
	@setup/build.sh $(JOBS) --configure
	@ctest --test-dir build --output-on-failure -L check -j $(JOBS)

architecture:
	@tests/tree/check.py folders --write

test: build
	@setup/test.sh -j $(JOBS)

test-newest: setup
	@setup/build.sh --libtorch $(NEWEST) $(JOBS)
	@setup/test.sh --libtorch $(NEWEST) -j $(JOBS)

extras: setup
	@setup/extras.sh

install: setup
	@setup/build.sh $(JOBS) echelon/all
	@cmake --install build --prefix $(PREFIX)

package: setup
	@setup/build.sh $(JOBS) echelon/all
	@setup/package.sh

clean:
	@rm -rf build build-$(NEWEST)
