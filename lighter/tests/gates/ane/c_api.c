// SPDX-License-Identifier: MIT OR Apache-2.0
// A program in C with ONNX Runtime's public headers: registers the device's library as the headers say, runs a model on
// the device and on its own processor, and compares to the bit.
//
// usage: c_api LIBONNXRUNTIME LIGHTER_LIBRARY MODEL RUNS DIM…
//
// Prints `RUNS runs, N equal`. Ends with 1 when something could not be done at all. Built by tools/ane-programs. It calls
// no function of the C library that has changed lately, so that it runs in older images than the system that built it.

#include <dlfcn.h>
#include <stdio.h>

#include "onnxruntime_c_api.h"

#define MAX_RANK 8

static const OrtApi *ort;

static void fail(const char *what, const char *why) {
	fprintf(stderr, "c_api: error: %s: %s\n", what, why);
	exit(1);
}

static void check(OrtStatus *status, const char *what) {
	if (status != NULL) {
		fail(what, ort->GetErrorMessage(status));
	}
}

static size_t number(const char *text) {
	size_t value = 0;
	for (; *text >= '0' && *text <= '9'; text++) {
		value = value * 10 + (size_t)(*text - '0');
	}
	return value;
}

// The device among those that the runtime has found.
static const OrtEpDevice *device(OrtEnv *env) {
	const OrtEpDevice *const *devices = NULL;
	size_t count = 0;
	check(ort->GetEpDevices(env, &devices, &count), "devices");
	for (size_t i = 0; i < count; i++) {
		if (strcmp(ort->EpDevice_EpName(devices[i]), "LighterANE") == 0) {
			return devices[i];
		}
	}
	fail("devices", "LighterANE is not among them");
	return NULL;
}

static OrtSession *session(OrtEnv *env, const char *model, const OrtEpDevice *device) {
	OrtSessionOptions *options = NULL;
	OrtSession *made = NULL;
	check(ort->CreateSessionOptions(&options), "session options");
	if (device != NULL) {
		const char *names[] = {"min_work"}, *values[] = {"0"};
		check(ort->SessionOptionsAppendExecutionProvider_V2(options, env, &device, 1, names, values, 1), "the device");
	}
	check(ort->CreateSession(env, model, options, &made), model);
	ort->ReleaseSessionOptions(options);
	return made;
}

// The bytes of the first output; the caller releases the value.
static const float *run(OrtSession *session, OrtAllocator *allocator, const OrtValue *input, OrtValue **output, size_t *count) {
	char *input_name = NULL, *output_name = NULL;
	check(ort->SessionGetInputName(session, 0, allocator, &input_name), "input");
	check(ort->SessionGetOutputName(session, 0, allocator, &output_name), "output");
	const char *inputs[] = {input_name}, *outputs[] = {output_name};
	check(ort->Run(session, NULL, inputs, &input, 1, outputs, 1, output), "run");
	check(ort->AllocatorFree(allocator, input_name), "input");
	check(ort->AllocatorFree(allocator, output_name), "output");
	OrtTensorTypeAndShapeInfo *info = NULL;
	void *data = NULL;
	check(ort->GetTensorTypeAndShape(*output, &info), "shape");
	check(ort->GetTensorShapeElementCount(info, count), "shape");
	ort->ReleaseTensorTypeAndShapeInfo(info);
	check(ort->GetTensorMutableData(*output, &data), "data");
	return data;
}

static const OrtApi *load(const char *path) {
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) {
		fail(path, dlerror());
	}
	const OrtApiBase *(*base)(void) = NULL;
	*(void **)&base = dlsym(library, "OrtGetApiBase");
	const OrtApi *api = base == NULL ? NULL : base()->GetApi(ORT_API_VERSION);
	if (api == NULL) {
		fail(path, "it is older than the headers");
	}
	return api;
}

int main(int argc, char **argv) {
	if (argc < 6 || argc > 5 + MAX_RANK) {
		fail("usage", "c_api LIBONNXRUNTIME LIGHTER_LIBRARY MODEL RUNS DIM…");
	}
	ort = load(argv[1]);
	OrtEnv *env = NULL;
	check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "c_api", &env), "environment");
	check(ort->RegisterExecutionProviderLibrary(env, "lighter", argv[2]), argv[2]);
	OrtSession *own = session(env, argv[3], NULL);
	OrtSession *remote = session(env, argv[3], device(env));

	int64_t dims[MAX_RANK];
	size_t rank = (size_t)argc - 5, elements = 1;
	for (size_t i = 0; i < rank; i++) {
		dims[i] = (int64_t)number(argv[5 + i]);
		elements *= (size_t)dims[i];
	}
	OrtAllocator *allocator = NULL;
	OrtValue *input = NULL;
	float *data = NULL;
	check(ort->GetAllocatorWithDefaultOptions(&allocator), "allocator");
	check(ort->CreateTensorAsOrtValue(allocator, dims, rank, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &input), "input");
	check(ort->GetTensorMutableData(input, (void **)&data), "input");

	size_t runs = number(argv[4]), equal = 0;
	uint32_t random = 1;
	for (size_t i = 0; i < runs; i++) {
		for (size_t j = 0; j < elements; j++) {
			random = random * 1664525 + 1013904223;
			data[j] = (float)(random >> 8) / (1 << 23) - 1;
		}
		OrtValue *expected = NULL, *got = NULL;
		size_t expected_count = 0, got_count = 0;
		const float *one = run(own, allocator, input, &expected, &expected_count);
		const float *other = run(remote, allocator, input, &got, &got_count);
		equal += expected_count == got_count && memcmp(one, other, expected_count * sizeof(float)) == 0;
		ort->ReleaseValue(expected);
		ort->ReleaseValue(got);
	}
	printf("%zu runs, %zu equal\n", runs, equal);

	ort->ReleaseValue(input);
	ort->ReleaseSession(remote);
	ort->ReleaseSession(own);
	check(ort->UnregisterExecutionProviderLibrary(env, "lighter"), "unregistering");
	ort->ReleaseEnv(env);
	return 0;
}
