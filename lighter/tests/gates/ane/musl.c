// SPDX-License-Identifier: MIT OR Apache-2.0
// A program for musl that loads the device's library as ONNX Runtime does. There is no ONNX Runtime for musl to be had as
// a package, so this has as much of one as making a provider takes; whatever else the library calls ends the program.
//
// usage: musl LIGHTER_LIBRARY
//
// Loads it as ONNX Runtime 1.23 and as 1.24, makes a provider, one with a wrong option, and unloads it, and prints a line
// for each. Built by tools/ane-programs.

#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include "onnxruntime_c_api.h"

// Where the runtime of version 1.24 has what that version added to these tables.
enum { CREATE_HARDWARE_DEVICE = 16, RELEASE_HARDWARE_DEVICE = 17 };
_Static_assert(sizeof(OrtEpApi) <= CREATE_HARDWARE_DEVICE * sizeof(void *), "the header is newer than this program");

static union {
	OrtApi api;
	void *slots[1024];
} runtime;

static union {
	OrtEpApi api;
	void *slots[64];
} providers;

static const char *version;
// The one option that the session has, by the end of its name.
static const char *option_name, *option_value;

static void not_here(void) {
	puts("called what this program does not have");
	fflush(stdout);
	_exit(1);
}

static OrtStatus *create_status(OrtErrorCode code, const char *message) {
	printf("refused with %d: %s\n", (int)code, message);
	return (OrtStatus *)strdup(message);
}

static const OrtEpApi *get_ep_api(void) {
	return &providers.api;
}

static OrtStatus *create_hardware_device(int type, uint32_t vendor, uint32_t id, const char *name, const void *pairs, void **made) {
	static int hardware;
	(void)vendor, (void)id, (void)pairs;
	printf("a device of type %d from %s\n", type, name);
	*made = &hardware;
	return NULL;
}

static OrtStatus *create_ep_device(OrtEpFactory *factory, const OrtHardwareDevice *hardware, const OrtKeyValuePairs *metadata,
	const OrtKeyValuePairs *options, OrtEpDevice **made) {
	static int device;
	(void)factory, (void)hardware, (void)metadata, (void)options;
	*made = (OrtEpDevice *)&device;
	return NULL;
}

static void release_hardware_device(void *device) {
	(void)device;
}

static bool is_the_option(const char *key) {
	size_t length = strlen(key), wanted = option_name == NULL ? 0 : strlen(option_name);
	return wanted > 0 && length > wanted && strcmp(key + length - wanted, option_name) == 0;
}

static OrtStatus *has_entry(const OrtSessionOptions *options, const char *key, int *is_there) {
	(void)options;
	*is_there = is_the_option(key);
	return NULL;
}

static OrtStatus *get_entry(const OrtSessionOptions *options, const char *key, char *value, size_t *bytes) {
	(void)options, (void)key;
	*bytes = strlen(option_value) + 1;
	if (value != NULL) {
		memcpy(value, option_value, *bytes);
	}
	return NULL;
}

static const OrtApi *get_api(uint32_t asked) {
	return asked <= 24 ? &runtime.api : NULL;
}

static const char *get_version(void) {
	return version;
}

static void fill(void) {
	for (size_t i = 0; i < sizeof runtime.slots / sizeof *runtime.slots; i++) {
		runtime.slots[i] = (void *)not_here;
	}
	for (size_t i = 0; i < sizeof providers.slots / sizeof *providers.slots; i++) {
		providers.slots[i] = (void *)not_here;
	}
	runtime.api.CreateStatus = create_status;
	runtime.api.GetEpApi = get_ep_api;
	runtime.api.HasSessionConfigEntry = has_entry;
	runtime.api.GetSessionConfigEntry = get_entry;
	providers.api.CreateEpDevice = create_ep_device;
	providers.slots[CREATE_HARDWARE_DEVICE] = (void *)create_hardware_device;
	providers.slots[RELEASE_HARDWARE_DEVICE] = (void *)release_hardware_device;
}

static void make_provider(OrtEpFactory *factory) {
	OrtEp *made = NULL;
	free(factory->CreateEp(factory, NULL, NULL, 0, NULL, NULL, &made));
	if (made != NULL) {
		printf("a provider named %s\n", made->GetName(made));
		factory->ReleaseEp(factory, made);
	}
}

int main(int argc, char **argv) {
	setvbuf(stdout, NULL, _IONBF, 0);
	void *library = dlopen(argc == 2 ? argv[1] : "", RTLD_NOW | RTLD_LOCAL);
	CreateEpApiFactoriesFn create = NULL;
	ReleaseEpApiFactoryFn release = NULL;
	if (library != NULL) {
		*(void **)&create = dlsym(library, "CreateEpFactories");
		*(void **)&release = dlsym(library, "ReleaseEpFactory");
	}
	if (create == NULL || release == NULL) {
		printf("cannot load it: %s\n", dlerror());
		return 1;
	}
	fill();
	const OrtApiBase base = {get_api, get_version};
	OrtEpFactory *factory = NULL;
	OrtEpDevice *devices[4];
	size_t count = 0;
	version = "1.23.2";
	free(create("lighter", &base, NULL, &factory, 1, &count));
	printf("as %s: %zu factories\n", version, count);
	version = "1.24.4";
	free(create("lighter", &base, NULL, &factory, 1, &count));
	printf("as %s: %zu factories\n", version, count);
	if (count != 1) {
		return 1;
	}
	free(factory->GetSupportedDevices(factory, NULL, 0, devices, 4, &count));
	printf("%s of %s: %zu devices\n", factory->GetName(factory), factory->GetVendor(factory), count);
	make_provider(factory);
	option_name = "transport", option_value = "pigeons";
	make_provider(factory);
	free(release(factory));
	printf("unloaded: %d\n", dlclose(library));
	return 0;
}
