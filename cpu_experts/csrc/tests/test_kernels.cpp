// Every kernel of every instruction set, for every number of rows, on buffers that end (or begin) at a page that may not be
// touched: AddressSanitizer does not see what tile instructions read and write; the page does. Sums are compared with those of
// the portable kernels, which the Python tests hold against the specification.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "gemm.h"

namespace {

using namespace cpu_experts;

constexpr size_t kPage = 4096;
int failures = 0;

// Bytes between two forbidden pages, against the one behind them or the one before.
class Guarded {
public:
    Guarded(size_t bytes, bool at_end) : held_(round_up(bytes, kPage) + 2 * kPage) {
        void* all = mmap(nullptr, held_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) std::abort();
        all_ = static_cast<uint8_t*>(all);
        mprotect(all_, kPage, PROT_NONE);
        mprotect(all_ + held_ - kPage, kPage, PROT_NONE);
        at_ = at_end ? all_ + held_ - kPage - bytes : all_ + kPage;
    }
    ~Guarded() { munmap(all_, held_); }
    Guarded(const Guarded&) = delete;
    template <class T = uint8_t>
    T* at() const {
        return reinterpret_cast<T*>(at_);
    }

private:
    size_t held_;
    uint8_t *all_, *at_;
};

std::mt19937 random_bits(1);

// Whole numbers of at most 127, with one of these in every line: such rows are bytes without rounding.
uint16_t byte_as_bf16(size_t i) {
    float whole = i % (kLine / 2) ? float(int(random_bits() % 255) - 127) : 127.0f;
    uint32_t bits;
    std::memcpy(&bits, &whole, 4);
    return uint16_t(bits >> 16);
}

uint16_t small_bf16() { return uint16_t((random_bits() & 0x8000) | (0x3C00 + random_bits() % 0x0400)); }

struct Case {
    Precision precision;
    Shape shape;
    Panel panel;

    Case(Precision p, int k, const Guarded& to) : precision(p), shape(p, k) {
        uint8_t *data = to.at(), *scales = data + shape.data_bytes;
        panel = {data, scales, shape.steps, shape.group_steps};
        if (p == kBf16) {
            for (size_t i = 0; i < shape.data_bytes / 2; ++i) reinterpret_cast<uint16_t*>(data)[i] = small_bf16();
            return;
        }
        for (size_t i = 0; i < shape.data_bytes; ++i) data[i] = uint8_t(random_bits());
        if (p == kInt8) {
            auto* numbers = reinterpret_cast<float*>(scales);
            auto* bias = reinterpret_cast<int32_t*>(scales + kPanel * 4);
            for (int n = 0; n < kPanel; ++n) {
                numbers[n] = 0.01f * float(n + 1);
                bias[n] = 0;
                for (int s = 0; s < shape.steps; ++s) {
                    for (int k8 = 0; k8 < 64; ++k8) bias[n] += 128 * code8(n, s, k8);
                }
            }
        } else if (p == kFp8Block) {
            for (size_t i = 0; i < shape.data_bytes; ++i) data[i] = uint8_t((data[i] & 0x7F) == 0x7F ? 0 : data[i]);
            for (int i = 0; i < shape.steps / shape.group_steps * 2; ++i) reinterpret_cast<float*>(scales)[i] = 0.01f;
        } else if (kFormats[p].block_k > 1) {
            size_t halves = p == kQ4_K ? 2 * kPanel : kPanel, block = size_t(8 * kFormats[p].scale_bytes);
            for (uint8_t* at = scales; at < scales + size_t(shape.steps / 8) * block; at += block) {
                for (size_t i = 0; i < block; ++i) at[i] = uint8_t(random_bits());
                for (size_t i = 0; i < halves; ++i) reinterpret_cast<uint16_t*>(at)[i] = uint16_t(0x2C00 + i);
            }
        } else {
            auto* numbers = reinterpret_cast<uint16_t*>(scales);
            for (int i = 0; i < shape.steps / shape.group_steps * kPanel; ++i)
                numbers[i] = p == kQ8_0 ? uint16_t(0x2C00 + i) : small_bf16();
        }
    }
    int code8(int n, int s, int k) const {
        return reinterpret_cast<const int8_t*>(panel.data)[(size_t(s) * 2 + n / 16) * 1024 + k / 4 * 64 + n % 16 * 4 + k % 4];
    }
};

void compare(const char* what, Isa isa, const Case& c, int rows, const Sums& sums, const std::vector<float>& expected,
             double bound = 8e-3) {
    for (int m = 0; m < rows; ++m) {
        double error = 0, size = 0;
        for (int n = 0; n < kPanel; ++n) {
            double wanted = expected[size_t(m) * kPanel + size_t(n)], found = sums.row(m)[n];
            error += (found - wanted) * (found - wanted), size += wanted * wanted;
        }
        if (!(std::sqrt(error) <= bound * std::sqrt(size))) {
            std::printf("FAILED: %s, isa %d, precision %d, row %d of %d: error %g of %g\n", what, isa, c.precision, m, rows,
                        std::sqrt(error), std::sqrt(size));
            ++failures;
            return;
        }
    }
}

// As a damaged file may hold it: sums then wrap, to the same number on every instruction set.
void damage_bias(const Case& c, uint8_t* panel) {
    auto* bias = reinterpret_cast<int32_t*>(panel + c.shape.data_bytes + kPanel * 4);
    for (int n = 0; n < kPanel; ++n) bias[n] = n % 2 ? INT32_MAX - n : INT32_MIN + n;
}

// `take(m, row)` for every row of a block of bf16.
template <class Take>
void each_row(const Rows& a, int steps, Take take) {
    std::vector<uint16_t> row(size_t(steps) * kLine / 2);
    for (int m = 0; m < a.count; ++m) {
        for (int s = 0; s < steps; ++s) {
            std::memcpy(&row[size_t(s) * kLine / 2], a.data + size_t(s * a.count + m) * kLine, kLine);
        }
        take(m, Source{row.data(), true, int(row.size())});
    }
}

// A block of bf16 as int8.
class Int8Block {
public:
    Int8Block(PackInt8 pack, const Rows& a, int steps)
        : lines_((steps + 1) / 2), data_(size_t(lines_ * a.count) * kLine), scales_(size_t(a.count)), count_(a.count) {
        each_row(a, steps, [&](int m, const Source& row) {
            scales_[size_t(m)] = pack(row, m, a.count, lines_, data_.data(), nullptr);
        });
    }
    Rows rows() const { return {data_.data(), count_, scales_.data()}; }

private:
    int lines_;
    std::vector<uint8_t> data_;
    std::vector<float> scales_;
    int count_;
};

// The kernel for few rows, which may take them in a layout of its own.
void multiply_few(const Path& path, const Case& c, const Rows& a, bool at_end, const Sums& sums) {
    if (!path.pack_few) return path.few(c.panel, a, sums);
    Guarded block(size_t(c.shape.steps * a.count) * kLine, at_end);
    each_row(a, c.shape.steps, [&](int m, const Source& row) { path.pack_few(row, m, a.count, c.shape.steps, block.at()); });
    path.few(c.panel, {block.at(), a.count, nullptr}, sums);
}

// Each slice's rows and codes end (or begin) at a forbidden page, as whole panels and blocks do.
void multiply_slices(const Path& path, const Case& c, const Rows& a, int each, bool at_end, const Sums& sums) {
    int block_rows = a.count;
    Guarded scales(kConvertedScaleBytes, at_end);
    for (int step = 0; step < c.shape.steps; step += each) {
        int steps = c.shape.steps - step < each ? c.shape.steps - step : each;
        int first = path.narrows ? step / 2 : step, lines = path.narrows ? (steps + 1) / 2 : steps;
        Guarded rows(size_t(lines * block_rows) * kLine, at_end), codes(size_t(lines) * 2 * kTileBytes, at_end);
        std::memcpy(rows.at(), a.data + size_t(first * block_rows) * kLine, size_t(lines * block_rows) * kLine);
        Panel panel = slice_of(c.panel, c.precision, step, steps);
        Slice slice;
        if (path.convert) {
            slice.conversion = {path.convert, c.panel, step, steps, path.narrows ? 2 : 1, codes.at(), scales.at(), step % 3 == 0};
            panel.scales = scales.at();
        } else {
            std::memcpy(codes.at(), panel.data, size_t(steps) * 2 * kTileBytes);
        }
        panel.data = codes.at(), panel.steps = lines;
        slice.first = step == 0, slice.last = step + steps == c.shape.steps;
        slice.weights = {codes.at() + size_t(lines) * 2 * kTileBytes, kLine, step % 3}, slice.rows = {rows.at(), kLine, 9};
        path.slice(panel, {rows.at(), block_rows, a.scales}, slice, sums);
    }
}

// int8's integers are exact, however K is cut.
void must_equal(Isa isa, const Case& c, int rows, const Sums& sums, const std::vector<float>& expected) {
    for (int m = 0; m < rows; ++m) {
        if (!std::memcmp(sums.row(m), &expected[size_t(m) * kPanel], kPanel * sizeof(float))) continue;
        std::printf("FAILED: slices, isa %d, precision %d, row %d of %d: not the same\n", isa, c.precision, m, rows);
        ++failures;
        return;
    }
}

void run(Isa isa, const Kernels& kernels, Precision precision, int k, bool at_end, bool damaged = false, int row_step = 1) {
    Shape shape(precision, k);
    Guarded weights(shape.panel_bytes, at_end);
    Case c(precision, k, weights);
    if (damaged) damage_bias(c, weights.at());
    const Path& path = kernels.paths[precision];
    const Path& plain = portable_kernels().paths[precision];
    for (int rows = 1; rows <= kBlock; rows += row_step) {
        Guarded block(size_t(shape.steps * rows) * kLine, at_end), scales(size_t(rows) * 4, at_end);
        for (size_t i = 0; i < size_t(shape.steps * rows) * kLine / 2; ++i) {
            block.at<uint16_t>()[i] = path.pack_few ? byte_as_bf16(i) : small_bf16();
        }
        for (int m = 0; m < rows; ++m) scales.at<float>()[m] = 0.5f + float(m);
        Rows a{block.at(), rows, precision == kInt8 ? scales.at<float>() : nullptr};

        Shape wide(kBf16, shape.steps * 32);
        std::vector<uint8_t> expanded(wide.panel_bytes);
        Panel reference = c.panel;
        if (plain.convert) {
            plain.convert(c.panel, 0, shape.steps, expanded.data(), nullptr);
            reference.data = expanded.data();
        }
        std::vector<float> expected(size_t(rows) * kPanel);
        plain.slice(reference, a, {}, {expected.data(), kPanel});

        for (size_t line : {size_t(kPanel), size_t(kPanel) + 16}) {
            Guarded out((size_t(rows - 1) * line + kPanel) * 4, at_end);
            Sums sums{out.at<float>(), line};
            if (path.few) {
                multiply_few(path, c, a, at_end, sums);
                compare("few", isa, c, rows, sums, expected, path.pack_few ? 1.2e-2 : 8e-3);  // weights expected are rounded
            }
            if (path.block) {
                path.block(c.panel, a, sums);
                compare("block", isa, c, rows, sums, expected);
            }
            std::vector<float> exact = expected;
            for (int each : {8, 1 << 20}) {
                if (line > kPanel) break;
                Int8Block int8(kernels.paths[path.narrows ? precision : kInt8].pack_int8, a, shape.steps);
                multiply_slices(path, c, path.narrows ? int8.rows() : a, each, at_end, sums);
                compare("slices", isa, c, rows, sums, expected, path.narrows ? 5e-2 : 8e-3);
                if (path.narrows && each == 8) std::memcpy(exact.data(), sums.at, exact.size() * sizeof(float));
                if (path.narrows || precision == kInt8) must_equal(isa, c, rows, sums, exact);
            }
        }

        Guarded placed((size_t(rows - 1) * 2 + 1) * kPanel * 4, true);
        Sums from{expected.data(), kPanel}, to{placed.at<float>(), 2 * kPanel};
        for (bool many : {false, true}) {
            kernels.put(from, rows, to, many);
            compare("put", isa, c, rows, to, expected);
        }
    }
}

// What SwiGLU makes of gates of every size: as many rows of bf16 as there are, nothing between them, and NaN where there was one.
void swiglu(Isa isa, const Kernels& kernels) {
    constexpr int rows = 32, line = 20;
    std::vector<float> sums(size_t(rows) * kPanel);
    for (int m = 0; m < rows; ++m) {
        for (int n = 0; n < kTile; ++n) {
            float gate = float(m - 16) * float(n * n) * 0.05f;  // to 180 either way
            sums[size_t(m * kPanel + n)] = gate, sums[size_t(m * kPanel + kTile + n)] = 1.5f - float(n);
        }
    }
    sums[3] = NAN, sums[kPanel + 4] = INFINITY;
    Guarded placed(size_t((rows - 1) * line + kTile) * 2, true);
    std::memset(placed.at(), 0x11, size_t((rows - 1) * line + kTile) * 2);
    kernels.swiglu(sums.data(), rows, line, placed.at<uint16_t>());
    for (int i = 0; i < (rows - 1) * line + kTile; ++i) {
        int m = i / line, n = i % line;
        uint16_t found = placed.at<uint16_t>()[i];
        if (n >= kTile) {
            if (found != 0x1111) std::printf("FAILED: swiglu, isa %d: written between rows\n", isa), ++failures;
            continue;
        }
        double gate = sums[size_t(m * kPanel + n)], up = sums[size_t(m * kPanel + kTile + n)];
        double wanted = gate / (1 + std::exp(-gate)) * up;
        uint32_t bits = uint32_t(found) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        bool same = std::isfinite(wanted) ? std::abs(value - wanted) <= 0.0040 * std::abs(wanted) + 1e-32
                                          : std::isnan(wanted) ? std::isnan(value) : value == wanted;
        if (same) continue;
        std::printf("FAILED: swiglu, isa %d: %g of gate %g and up %g, not %g\n", isa, double(value), gate, up, wanted);
        ++failures;
    }
}

}  // namespace

int main() {
    for (Isa isa : {kPortable, kAvx2, kAvx512, kAmx}) {
        const Kernels* kernels = kernels_of(isa);
        if (!kernels) {
            std::printf("instruction set %d: not here\n", isa);
            continue;
        }
        swiglu(isa, *kernels);
        for (int p = 0; p < kPrecisions; ++p) {
            for (int k : kFormats[p].block_k > 1 ? std::vector<int>{256, 768} : std::vector<int>{1, 65, 130, 320}) {
                for (bool at_end : {true, false}) run(isa, *kernels, Precision(p), k, at_end);
            }
        }
        for (Precision p : {kBf16, kInt8}) {  // every size of the last slice
            for (int steps = 9; steps <= 24; ++steps) run(isa, *kernels, p, steps * kFormats[p].step_k - 1, true, false, 10);
        }
        run(isa, *kernels, kInt8, 130, true, true);
        run(isa, *kernels, kInt8, 700, true, true, 10);
        std::printf("instruction set %d: %s\n", isa, failures ? "failed" : "ok");
    }
    return failures != 0;
}
