# Two commands: `make demo` and `make test`. Each does all of its set-up; a
# second run costs nothing. `make extras` adds what only some tests need.
.PHONY: help demo test extras build setup install clean
.DEFAULT_GOAL := help

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local

help:
	@echo "make demo     train a classifier of handwritten digits on two ranks, and write its report"
	@echo "make test     build everything and run every test"
	@echo "make extras   set up what only some tests need: Python's PyTorch, Chromium, mpirun"
	@echo "make build    build only; the programs land in build/bin/"
	@echo "make install  install the programs and the CMake package under PREFIX=$(PREFIX)"

setup:
	@setup/packages.sh

build: setup
	@setup/build.sh $(JOBS)

demo: setup
	@setup/build.sh $(JOBS) echelon echelon-train
	@setup/demo.sh

test: build
	@setup/test.sh -j $(JOBS)

extras: setup
	@setup/extras.sh

install: build
	@cmake --install build --prefix $(PREFIX)

clean:
	@rm -rf build
