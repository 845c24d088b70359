// SPDX-License-Identifier: MIT OR Apache-2.0
// Steps of a linear congruential generator on each word of a buffer. Compiled to steps.spv with
//   glslangValidator -V --target-env vulkan1.1 steps.comp -o steps.spv
#version 450
layout(local_size_x = 64) in;
layout(set = 0, binding = 0, std430) buffer Words { uint words[]; };
layout(push_constant) uniform Constants { uint count; uint steps; };
void main() {
    uint at = gl_GlobalInvocationID.x;
    if (at >= count) return;
    uint x = words[at];
    for (uint i = 0; i < steps; i++) x = x * 1664525u + 1013904223u;
    words[at] = x;
}
