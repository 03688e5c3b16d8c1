// Prints what native.cpp makes of fixed rows and quantised weights, as hexadecimal floats: the same on every processor.
#include "native.cpp"

#include <cstdio>
#include <vector>

static uint32_t state = 1;
static uint32_t next() { return state = state * 1664525 + 1013904223; }
static float number() { return (float)((int32_t)(next() >> 8) - (1 << 23)) / (1 << 21); }

int main() {
    const int64_t sizes[][3] = {{1, 16, 32}, {2, 33, 64}, {9, 40, 128}, {3, 100, 1536}};
    for (int64_t kind : {(int64_t)INT8, (int64_t)INT4})
        for (auto &size : sizes) {
            const int64_t rows = size[0], out = size[1], in = size[2] + (kind == INT8 ? 5 : 0);
            const int64_t tiles = (out + 15) / 16, wide = (in + 31) / 32 * 32, groups = in / 64 ? in / 64 : 1;
            std::vector<char> values(tiles * 16 * wide / (kind == INT4 ? 2 : 1) + 4096);
            std::vector<uint16_t> scale(kind == INT8 ? tiles * 16 : tiles * groups * 32);
            std::vector<float> x(rows * in), y(rows * out), bias(out);
            for (auto &value : values) value = (char)(next() >> 24);
            if (kind == INT8)
                for (auto &value : values)
                    if (value == 0) value = 1;  // -128 is not a value of an int8 weight
            for (auto &value : scale) value = 0x3c00 + (next() >> 24);
            for (auto &value : x) value = number();
            for (auto &value : bias) value = number();
            const Weight w = {kind, out, in, in >= 64 ? 6 : 5, FLOAT32, values.data(), scale.data(), bias.data()};
            selfspec_multiply(&w, x.data(), in, y.data(), out, rows, 0, 1);
            for (float sum : y) printf("%a\n", sum);
        }
}
