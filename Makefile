# SPDX-License-Identifier: MIT OR Apache-2.0
# The front door for people and CI: each target does its own set-up, and can be run again.

.PHONY: help demo test test-quick gates gate-m9 gate-m10 gate-m11 gate-m12 op-db bench-metal bench-ane bench-mps fuzz build engine engine-start engine-stop images

help: ## List the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)$$/\1	\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: ## The main job on a fresh machine: a container generates text on this host's engine
	tools/demo

test: ## All tests but the long ones, with all the set-up that they need
	tools/test all

test-quick: ## Form, lints, unit and property tests: no engine, no root
	tools/test quick

gates: ## All tests, the long gates, and some minutes of fuzzing
	tools/test gates
	tools/fuzz 180

gate-m9: ## Gate m9 alone: Mesa in a container computes on the host's GPU
	tools/test gate m9

gate-m10: ## Gate m10 alone: ONNX Runtime in a container against the container's own processor
	tools/test gate m10

gate-m11: ## Gate m11 alone: stock torch in a container trains on the host's torch
	tools/test gate m11

gate-m12: ## Gate m12 alone: llama.cpp in a container against native
	tools/test gate m12

op-db: ## Every operator of torch on the mps device, against the processor
	tools/op-db

bench-metal: ## The metal device beside native and ggml's own server; writes docs/benchmarks.md
	tools/bench-metal

bench-ane: ## The ane device beside the container's own ONNX Runtime; writes docs/benchmarks.md
	tools/bench-ane

bench-mps: ## The mps device beside native, its own variants and a peer; writes docs/benchmarks.md
	tools/bench-mps

fuzz: ## One minute of fuzzing per parser of outside bytes
	tools/fuzz 60

build: ## Build lighter and its hook into target/dist
	tools/toolchain
	tools/build

engine: ## Fetch the test engine (a private Docker from Debian's packages)
	tools/engine fetch

engine-start: ## Start the test engine and print its socket
	tools/engine start

engine-stop: ## Stop the test engine; its images stay
	tools/engine stop

images: engine-start ## Build the images of the gates and load them into the test engine
	tools/images
