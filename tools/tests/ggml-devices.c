// SPDX-License-Identifier: MIT OR Apache-2.0
// Prints the name of every ggml device that the plug-ins in a folder offer, one a line. Run inside an engine root by
// the test of tools/engine-root; built for the system outside. It fails when ggml cannot be loaded or has no device.
// usage: ggml-devices BACKENDS_FOLDER
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

// A function of a library, or the end.
static void *function(void *library, const char *name) {
	void *found = dlsym(library, name);
	if (!found) {
		fprintf(stderr, "ggml-devices: %s\n", dlerror());
		exit(1);
	}
	return found;
}

static void *library(const char *name) {
	void *opened = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
	if (!opened) {
		fprintf(stderr, "ggml-devices: %s\n", dlerror());
		exit(1);
	}
	return opened;
}

int main(int argc, char **argv) {
	if (argc != 2) {
		fprintf(stderr, "usage: ggml-devices BACKENDS_FOLDER\n");
		return 2;
	}
	void *base = library("libggml-base.so.0");
	void *ggml = library("libggml.so.0");
	void (*load_all)(const char *) = (void (*)(const char *))function(ggml, "ggml_backend_load_all_from_path");
	size_t (*device_count)(void) = (size_t (*)(void))function(ggml, "ggml_backend_dev_count");
	void *(*device)(size_t) = (void *(*)(size_t))function(ggml, "ggml_backend_dev_get");
	const char *(*name)(void *) = (const char *(*)(void *))function(base, "ggml_backend_dev_name");
	const char *(*description)(void *) = (const char *(*)(void *))function(base, "ggml_backend_dev_description");

	load_all(argv[1]);
	size_t count = device_count();
	for (size_t i = 0; i < count; i++) printf("%s: %s\n", name(device(i)), description(device(i)));
	return count == 0;
}
