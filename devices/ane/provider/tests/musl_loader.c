// SPDX-License-Identifier: MIT OR Apache-2.0
// Loads the plug-in into a program of another C library and plays as much of ONNX Runtime as it needs to be asked for a
// device and a session's provider. Run by musl.rs, which says where the functions lie in the runtime's table.
//
// usage: musl_loader LIBRARY GET_EP_API CREATE_STATUS HAS_ENTRY      offsets in bytes
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { API_VERSION = 24, SLOTS = 512, DEVICE = 0x1234, HARDWARE = 0x5678 };

static void *api[SLOTS];
static void *ep_api[64];

static void *nothing(void) { return NULL; }
static void *create_status(int code, const char *message) { return printf("status %d: %s\n", code, message) > 0 ? strdup(message) : NULL; }
static void *get_ep_api(void) { return ep_api; }
static void *get_api(uint32_t version) { return version <= API_VERSION ? api : NULL; }
static const char *version(void) { return "1.24.0"; }
static void *has_entry(const void *options, const char *key, int *is_set) {
	(void)options;
	(void)key;
	*is_set = 0;
	return NULL;
}
static void *create_hardware(int type, uint32_t vendor, uint32_t device, const char *name, const void *more, void **made) {
	(void)vendor, (void)device, (void)more;
	printf("hardware of type %d by %s\n", type, name);
	*made = (void *)HARDWARE;
	return NULL;
}
static void *create_device(void *factory, const void *hardware, const void *more, const void *options, void **made) {
	(void)factory, (void)more, (void)options;
	*made = hardware == (void *)HARDWARE ? (void *)DEVICE : NULL;
	return NULL;
}

struct base {
	void *(*get_api)(uint32_t);
	const char *(*version)(void);
};
struct factory {
	uint32_t version;
	const char *(*name)(const void *);
	const char *(*vendor)(const void *);
	void *(*devices)(void *, const void *const *, size_t, void **, size_t, size_t *);
	void *(*create)(void *, const void *const *, const void *const *, size_t, const void *, const void *, void **);
	void (*release)(void *, void *);
};
struct ep {
	uint32_t version;
	const char *(*name)(const void *);
};

static void place(const char *offset, void *function) { api[(size_t)atol(offset) / sizeof(void *)] = function; }

int main(int count, char **arguments) {
	if (count != 5) return 2;
	for (int slot = 0; slot < SLOTS; slot++) api[slot] = (void *)nothing;
	place(arguments[2], (void *)get_ep_api);
	place(arguments[3], (void *)create_status);
	place(arguments[4], (void *)has_entry);
	ep_api[0] = (void *)create_device;
	ep_api[16] = (void *)create_hardware;

	void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
	void *(*make)(const char *, const struct base *, const void *, void **, size_t, size_t *) = dlsym(library, "CreateEpFactories");
	void *(*give)(void *) = dlsym(library, "ReleaseEpFactory");
	if (make == NULL || give == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;

	struct base base = {get_api, version};
	struct factory *factory = NULL;
	size_t made = 0, devices = 0;
	void *device = NULL, *provider = NULL;
	if (make("test", &base, NULL, (void **)&factory, 1, &made) != NULL || made != 1) return 1;
	if (factory->devices(factory, NULL, 0, &device, 1, &devices) != NULL || devices != 1 || device != (void *)DEVICE) return 1;
	if (factory->create(factory, NULL, NULL, 0, NULL, NULL, &provider) != NULL || provider == NULL) return 1;
	printf("%s by %s\n", ((struct ep *)provider)->name(provider), factory->vendor(factory));
	factory->release(factory, provider);
	give(factory);
	dlclose(library);
	puts("done");
	return 0;
}
