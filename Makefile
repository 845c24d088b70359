# SPDX-License-Identifier: MIT OR Apache-2.0
# The front door for people and CI: each target does its own set-up, and can be run again.

.PHONY: help engine engine-start engine-stop images

help: ## List the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)$$/\1	\2/p' $(MAKEFILE_LIST) | expand -t 16

engine: ## Fetch the test engine (a private Docker from Debian's packages)
	tools/engine fetch

engine-start: ## Start the test engine and print its socket
	tools/engine start

engine-stop: ## Stop the test engine; its images stay
	tools/engine stop

images: engine-start ## Build the images of the gates and load them into the test engine
	tools/images
