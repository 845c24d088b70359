// SPDX-License-Identifier: MIT OR Apache-2.0
// An old client: a program with a whisper.cpp and ggml of the end of 2025 in it, which speak RPC protocol 3.6.
//
// usage: protocol-3 ENDPOINT MODEL
//
// Computes the same on its own processor and on the server, side by side, and prints for each how far the two are apart
// and how long a token took. tools/old-clients builds it, the gate old_clients runs it. It judges nothing: it ends with 1
// only when something could not be computed at all.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-rpc.h"
#include "ggml.h"
#include "whisper.h"

namespace {

constexpr int kThreads = 1;

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "protocol-3: error: %s\n", what);
    std::exit(1);
}

double now_us() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

/// What one side computed, and how long a token took it.
struct Result {
    std::vector<float> values;
    std::vector<int> best;
    double us_per_token = 0;
};

/// Largest difference as a part of the range that the processor's values span. NaN is told by its own name.
double apart(const Result & processor, const Result & device) {
    if (processor.values.size() != device.values.size()) fail("the two gave different numbers of values");
    const auto [low, high] = std::minmax_element(processor.values.begin(), processor.values.end());
    double most = 0;
    for (size_t i = 0; i < processor.values.size(); i++) {
        const double difference = std::fabs(double(processor.values[i]) - double(device.values[i]));
        if (!std::isfinite(difference)) return NAN;
        most = std::max(most, difference);
    }
    return most / (*high - *low);
}

void report(const char * name, const Result & processor, const Result & device) {
    size_t same = 0;
    for (size_t i = 0; i < processor.best.size(); i++) same += processor.best[i] == device.best[i];
    std::printf("%s: apart %.9f, best %zu of %zu, processor %.1f us, device %.1f us\n", name, apart(processor, device), same,
                processor.best.size(), processor.us_per_token, device.us_per_token);
}

/// Whisper over a made-up sound, with given tokens, so that one near-tie does not change all that follows.
Result whisper(const char * model, bool on_device) {
    constexpr int kTokens = 48;
    whisper_context_params params = whisper_context_default_params();
    params.use_gpu = on_device;
    // Attention in plain operations: this ggml's flash attention adds up in 16 bits over the whole sound and is some
    // hundredths away from its own plain one, which newer ggmls' is not.
    params.flash_attn = false;
    whisper_context * context = whisper_init_from_file_with_params(model, params);
    if (!context) fail("the model could not be loaded");
    std::vector<float> sound(2 * WHISPER_SAMPLE_RATE);
    for (size_t i = 0; i < sound.size(); i++) {
        const double t = double(i) / WHISPER_SAMPLE_RATE;
        sound[i] = float(0.5 * std::sin(2 * 3.14159265358979 * (200 + 400 * t) * t));
    }
    if (whisper_pcm_to_mel(context, sound.data(), int(sound.size()), kThreads) != 0) fail("no spectrum");
    if (whisper_encode(context, 0, kThreads) != 0) fail("the sound could not be encoded");
    Result result;
    const int vocabulary = whisper_n_vocab(context);
    double from = 0;
    for (int i = 0; i < kTokens; i++) {
        // The first token also waits for the sound, which a server encodes while the client goes on.
        if (i == 1) from = now_us();
        const whisper_token token = i == 0 ? whisper_token_sot(context) : (i * 7919) % 50000;
        if (whisper_decode(context, &token, 1, i, kThreads) != 0) fail("a token could not be decoded");
        const float * logits = whisper_get_logits(context);
        result.values.insert(result.values.end(), logits, logits + vocabulary);
        result.best.push_back(int(std::max_element(logits, logits + vocabulary) - logits));
    }
    result.us_per_token = (now_us() - from) / (kTokens - 1);
    whisper_free(context);
    return result;
}

/// A graph so small that what surrounds it is what is measured: per token six inputs, one computation, one answer.
Result loop(ggml_backend_t backend) {
    constexpr int kInputs = 6, kLayers = 2, kWidth = 256, kInner = 512, kOutputs = 1024, kTokens = 600;
    ggml_context * context = ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    std::vector<ggml_tensor *> inputs, weights;
    const auto weight = [&](int columns, int rows) {
        weights.push_back(ggml_new_tensor_2d(context, GGML_TYPE_F32, columns, rows));
        return weights.back();
    };
    ggml_tensor * state = nullptr;
    for (int i = 0; i < kInputs; i++) {
        inputs.push_back(ggml_new_tensor_1d(context, GGML_TYPE_F32, kWidth));
        state = state ? ggml_add(context, state, inputs.back()) : inputs.back();
    }
    for (int i = 0; i < kLayers; i++) {
        ggml_tensor * inner = ggml_mul_mat(context, weight(kWidth, kInner), ggml_rms_norm(context, state, 1e-5f));
        state = ggml_add(context, state, ggml_mul_mat(context, weight(kInner, kWidth), ggml_silu(context, inner)));
    }
    ggml_tensor * output = ggml_mul_mat(context, weight(kWidth, kOutputs), state);
    ggml_cgraph * graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, output);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, backend);
    if (!buffer) fail("no memory for the small graph");
    std::vector<float> values;
    const auto fill = [&](ggml_tensor * tensor, int seed) {
        values.resize(size_t(ggml_nelements(tensor)));
        for (size_t i = 0; i < values.size(); i++) values[i] = float((i * 31 + size_t(seed) * 17) % 61) / 610.0f - 0.05f;
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
    };
    for (size_t i = 0; i < weights.size(); i++) fill(weights[i], int(i));
    Result result;
    std::vector<float> answer(kOutputs);
    const double from = now_us();
    for (int token = 0; token < kTokens; token++) {
        for (int i = 0; i < kInputs; i++) fill(inputs[size_t(i)], token + i);
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) fail("the small graph was not computed");
        ggml_backend_tensor_get(output, answer.data(), 0, ggml_nbytes(output));
        result.values.insert(result.values.end(), answer.begin(), answer.end());
        result.best.push_back(int(std::max_element(answer.begin(), answer.end()) - answer.begin()));
    }
    result.us_per_token = (now_us() - from) / kTokens;
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
    return result;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) fail("usage: protocol-3 ENDPOINT MODEL");
    std::printf("protocol %d.%d, ggml %s\n", RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION, ggml_version());
    std::fflush(stdout);
    ggml_backend_reg_t server = ggml_backend_rpc_add_server(argv[1]);
    if (!server) fail("the server does not answer");
    ggml_backend_register(server);

    ggml_backend_t processor = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(processor, kThreads);
    ggml_backend_t device = ggml_backend_rpc_init(argv[1], 0);
    if (!processor || !device) fail("a backend could not be started");
    report("loop", loop(processor), loop(device));
    ggml_backend_free(device);
    ggml_backend_free(processor);

    report("whisper", whisper(argv[2], false), whisper(argv[2], true));
    return 0;
}
