// Checks the native operators against plain scalar results, without torch: for processors that tests only emulate. Prints a line for
// each check that fails, and ends with 1.
#include <cstdio>
#include <functional>
#include <random>
#include <string>

#include "program.cpp"

namespace {

std::mt19937 numbers(7);
int failures = 0;

float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(numbers); }
int64_t below(int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(numbers); }

bf16 narrowed(double x) {  // to the nearest, ties to even
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(x));
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<bf16> random_bf16(int64_t count, float range = 1) {
    std::vector<bf16> found(count);
    for (bf16& x : found) x = narrowed(uniform(-range, range));
    return found;
}

void expect(bool right, const std::string& what) {
    if (right) return;
    failures++;
    std::printf("%s\n", what.c_str());
}

void expect_near(double found, double wanted, double tolerance, const std::string& what) {
    expect(std::abs(found - wanted) <= tolerance, what + ": " + std::to_string(found) + " for " + std::to_string(wanted));
}

// Vectors.

template <class V>
std::vector<float> lanes_of_floats(V x) {
    std::vector<float> found(16);
    store(found.data(), x);
    return found;
}

std::vector<uint8_t> bytes_of_line(Ints x) {
    std::vector<uint8_t> found(64);
    store_line(found.data(), x);
    return found;
}

void check_vectors() {
    float a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = uniform(-4, 4), b[i] = i % 3 ? a[i] : uniform(-4, 4);
    a[3] = NAN;
    const Floats x = load(a), y = load(b);
    const auto most = lanes_of_floats(max(x, y)), least = lanes_of_floats(min(x, y)), power = lanes_of_floats(exp(y));
    const auto scaled = lanes_of_floats(scale(y, round(x))), rest = lanes_of_floats(fraction(y));
    const Mask more = x > y, same = x == y;
    const auto chosen = lanes_of_floats(select(0x5a3c, x, y)), kept = lanes_of_floats(keep(0x1234, y));
    for (int i = 0; i < 16; i++) {
        const std::string lane = " of lane " + std::to_string(i);
        if (i != 3) {
            expect(most[i] == std::max(a[i], b[i]) && least[i] == std::min(a[i], b[i]), "max or min" + lane);
            expect_near(scaled[i], std::ldexp(b[i], static_cast<int>(std::nearbyint(a[i]))), 0, "scale" + lane);
        } else {
            expect(most[i] == b[i] && least[i] == b[i], "max or min of a NaN");
        }
        expect_near(power[i], std::exp(static_cast<double>(b[i])), 1e-5 * std::exp(b[i]), "exp" + lane);
        expect_near(rest[i], b[i] - std::floor(b[i]), 1e-6, "fraction" + lane);
        expect((more >> i & 1) == (a[i] > b[i]) && (same >> i & 1) == (a[i] == b[i]), "a comparison" + lane);
        expect(i == 3 || chosen[i] == (0x5a3c >> i & 1 ? a[i] : b[i]), "select" + lane);
        expect(kept[i] == (0x1234 >> i & 1 ? b[i] : 0), "keep" + lane);
    }
    const auto far = lanes_of_floats(exp(select(1, splat(-INFINITY), select(2, splat(INFINITY), splat(NAN)))));
    expect(far[0] == 0 && far[1] == INFINITY && std::isnan(far[2]), "exp of what is not finite");
    float sum = 0;
    for (float one : b) sum += one;
    expect_near(add_all(y), sum, 1e-5, "add_all");
    expect(max_all(y) == *std::max_element(b, b + 16), "max_all");

    Floats rows[16];
    Ints whole[16];
    for (int i = 0; i < 16; i++) rows[i] = y * splat(static_cast<float>(i)), whole[i] = lane_numbers() + splat(100 * i);
    const auto sums = lanes_of_floats(add_lanes(rows));
    for (int i = 0; i < 16; i++) expect_near(sums[i], i * sum, 1e-4, "add_lanes");
    transpose(whole);
    for (int i = 0; i < 16; i++) {
        int32_t row[16];
        store_line(row, whole[i]);
        for (int j = 0; j < 16; j++) expect(row[j] == 100 * j + i, "transpose");
    }
    const auto quarters = lanes_of_floats(max_of_quarters(y)), added = lanes_of_floats(add_quarters(splat(1.0f), y));
    for (int i = 0; i < 16; i++) expect(quarters[i] == std::max({b[i % 4], b[4 + i % 4], b[8 + i % 4], b[12 + i % 4]}), "max_of_quarters");
    for (int i = 0; i < 4; i++) expect(added[i] == 1 + b[i] + b[4 + i] + b[8 + i] + b[12 + i], "add_quarters");

    uint8_t line[64], other[64], table[128];
    for (int i = 0; i < 64; i++) line[i] = static_cast<uint8_t>(below(256)), other[i] = static_cast<uint8_t>(below(256));
    for (int i = 0; i < 128; i++) table[i] = static_cast<uint8_t>(below(256));
    const auto looked_up = bytes_of_line(ByteTable(table)(load_line(line)));
    const auto small = bytes_of_line(look_up_bytes(table_of_bytes(table), load_line(line) & splat_bytes(15)));
    const Ints ordered = order_bytes(load_line(line)), second = order_bytes(load_line(other));
    const auto low = bytes_of_line(interleave_ordered<0>(ordered, second)), high = bytes_of_line(interleave_ordered<1>(ordered, second));
    const auto words = bytes_of_line(interleave_words<1>(load_line(line), load_line(other)));
    const auto equal = bytes_of_line(select_bytes(load_line(line), load_line(other), splat_bytes(1), splat_bytes(2)));
    for (int i = 0; i < 64; i++) {
        expect(looked_up[i] == table[line[i] & 127] && small[i] == table[line[i] & 15], "a table of bytes");
        const uint8_t* from = i % 2 ? other : line;
        expect(low[i] == from[i / 2] && high[i] == from[32 + i / 2], "interleave_ordered");
        expect(words[i] == (i / 2 % 2 ? other : line)[32 + i / 4 * 2 + i % 2], "interleave_words");
        expect(equal[i] == (line[i] == other[i] ? 1 : 2), "select_bytes");
    }
    int32_t products[16];
    store_line(products, dot(splat(5), load_line(line), load_line(other)));
    for (int i = 0; i < 16; i++) {
        int32_t wanted = 5;
        for (int j = 4 * i; j < 4 * i + 4; j++) wanted += line[j] * static_cast<int8_t>(other[j]);
        expect(products[i] == wanted, "dot of bytes");
    }
    bf16 rounded[32], stored[16] = {};
    store_line(rounded, to_bf16(y, splat(2.0f) * y));
    store(stored, y, 0x7ff);
    for (int i = 0; i < 16; i++) {
        expect(rounded[i] == narrowed(b[i]) && rounded[16 + i] == narrowed(2 * b[i]), "to_bf16");
        expect(stored[i] == (i < 11 ? narrowed(b[i]) : 0), "store of some lanes");
    }
    store_line(rounded, pair_words(y, splat(2.0f) * y));
    for (int i = 0; i < 16; i++) expect(rounded[2 * i] == narrowed(b[i]) && rounded[2 * i + 1] == narrowed(2 * b[i]), "pair_words");
}

// Operators.

struct RunOp {
    void* engine = troupe_open(2);
    void operator()(const Op& op, const Step& step) const { expect(troupe_run(engine, &op, 1, &step), "an operator had no memory"); }
} const run_op;

// The products of x [rows, inputs] with weights double [outputs, inputs], in float64.
void check_product(Op op, const std::vector<bf16>& x, const std::function<double(int64_t, int64_t)>& weight, int64_t rows, double share,
                   const std::string& what) {
    const int64_t inputs = op.i0, outputs = op.i1;
    std::vector<bf16> out(rows * outputs);
    Step step = {};
    step.rows = rows;
    op.a = const_cast<bf16*>(x.data()), op.out = out.data(), op.stride_a = inputs, op.stride_out = outputs;
    run_op(op, step);
    double worst = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t output = 0; output < outputs; output++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < inputs; i++) {
                const double one = to_float(x[row * inputs + i]) * weight(output, i);
                sum += one, size += std::abs(one);
            }
            worst = std::max(worst, std::abs(to_float(out[row * outputs + output]) - sum) / (std::abs(sum) / 128 + size * share));
        }
    expect_near(worst, 0, 1, what + " of " + std::to_string(rows) + " rows");
}

void check_products() {
    const int64_t inputs = 512, outputs = 40, group = 64;
    Op op = {};
    op.i0 = inputs, op.i1 = outputs;
    for (int64_t rows : {1, 3, 33, 130}) {
        const std::vector<bf16> x = random_bf16(rows * inputs), weight = random_bf16(outputs * inputs);
        const auto space = [](int64_t bytes) { return std::vector<char>(bytes + 4096); };
        const auto aligned = [](std::vector<char>& of) {
            return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(of.data()) + 4095) / 4096 * 4096);
        };
        auto memory = space(2 * troupe_packed(outputs, inputs));
        op.b = aligned(memory);
        troupe_pack(weight.data(), outputs, inputs, op.b);
        op.kind = LINEAR;
        check_product(op, x, [&](int64_t o, int64_t i) { return to_float(weight[o * inputs + i]); }, rows, 1e-5, "LINEAR");

        std::vector<int8_t> whole(outputs * inputs);
        for (int8_t& one : whole) one = static_cast<int8_t>(below(256));
        std::vector<float> scales(outputs * inputs / group);
        for (float& one : scales) one = uniform(0.001f, 0.01f);
        auto memory8 = space(troupe_packed8(outputs, inputs));
        op.b = aligned(memory8);
        troupe_pack8(whole.data(), scales.data(), nullptr, outputs, inputs, op.b);
        op.kind = LINEAR8;
        check_product(op, x, [&](int64_t o, int64_t i) { return whole[o * inputs + i] * scales[o]; }, rows, 0.01, "LINEAR8");

        op.kind = GROUPED, op.i2 = group, op.f0 = 1;
        for (int64_t bits : {4, 8}) {
            std::vector<uint8_t> codes(outputs * inputs), zeros(scales.size());
            for (uint8_t& one : codes) one = static_cast<uint8_t>(below(1 << bits));
            for (uint8_t& one : zeros) one = static_cast<uint8_t>(below(1 << bits));
            auto packed = space(troupe_packed_grouped(outputs, inputs, group, bits));
            op.b = aligned(packed), op.i3 = bits;
            troupe_pack_grouped(codes.data(), scales.data(), zeros.data(), outputs, inputs, group, bits, op.b);
            const auto value = [&](int64_t o, int64_t i) {
                const int64_t at = o * inputs / group + i / group;
                return (codes[o * inputs + i] - zeros[at]) * scales[at];
            };
            check_product(op, x, value, rows, 0.005, "GROUPED of " + std::to_string(bits) + " bits");
        }

        std::vector<uint8_t> eighths(outputs * inputs);
        for (uint8_t& one : eighths) one = static_cast<uint8_t>(below(0x7f) | below(2) << 7);
        auto packed = space(troupe_packed_fp8(outputs, inputs, group));
        op.b = aligned(packed), op.kind = FP8;
        troupe_pack_fp8(eighths.data(), scales.data(), outputs, inputs, group, op.b);
        const auto e4m3 = [](uint8_t code) {
            const int power = code >> 3 & 15, rest = code & 7;
            const double size = power ? std::ldexp(8 + rest, power - 10) : std::ldexp(rest, -9);
            return code & 0x80 ? -size : size;
        };
        const auto eighth = [&](int64_t o, int64_t i) { return e4m3(eighths[o * inputs + i]) * scales[o * inputs / group + i / group]; };
        check_product(op, x, eighth, rows, 0.005, "FP8");

        for (int64_t bits = 2; bits <= 6; bits++) {
            Layout layout = {};
            layout.bits = bits, layout.super = 256, layout.group = bits == 2 || bits == 3 || bits == 6 ? 16 : 32;
            layout.zeros = bits == 2 || bits == 4 || bits == 5, layout.offset = layout.zeros ? 0 : 1 << (bits - 1);
            for (int i = 0; i < 16; i++) layout.table[i] = static_cast<float>(i - layout.offset);
            const int64_t supers = inputs / layout.super, groups = inputs / layout.group;
            std::vector<uint8_t> codes(outputs * inputs), less(outputs * groups);
            std::vector<int8_t> more(outputs * groups);
            std::vector<uint16_t> halves(outputs * supers), zeros(outputs * supers);
            for (uint8_t& one : codes) one = static_cast<uint8_t>(below(1 << bits));
            for (int8_t& one : more) one = static_cast<int8_t>(1 + below(15));
            for (uint8_t& one : less) one = static_cast<uint8_t>(below(16));
            for (uint16_t& one : halves) one = static_cast<uint16_t>(0x2000 + below(0x400));  // 2^-7 to 2^-6
            for (uint16_t& one : zeros) one = static_cast<uint16_t>(0x2000 + below(0x400));
            auto place = space(troupe_packed_blocks(&layout, outputs, inputs));
            op.b = aligned(place), op.kind = BLOCKS;
            troupe_begin_blocks(&layout, outputs, inputs, op.b);
            const Blocks from = {codes.data(), halves.data(), zeros.data(), more.data(), less.data()};
            troupe_pack_blocks(&from, 0, outputs, inputs, op.b);
            const auto half = [](uint16_t x) { return std::ldexp(1024 + (x & 1023), (x >> 10) - 25); };
            const auto value = [&](int64_t o, int64_t i) {
                const int64_t super = o * supers + i / layout.super, at = o * groups + i / layout.group;
                const double zero = layout.zeros ? half(zeros[super]) * less[at] : 0;
                return half(halves[super]) * more[at] * (codes[o * inputs + i] - layout.offset) - zero;
            };
            check_product(op, x, value, rows, 0.01, "BLOCKS of " + std::to_string(bits) + " bits");
        }
        op.i2 = op.i3 = 0, op.f0 = 0;
    }
}

void check_rows() {
    const int64_t rows = 3, size = 128;
    Step step = {};
    step.rows = rows;
    const std::vector<bf16> x = random_bf16(rows * 2 * size, 3);
    std::vector<bf16> out(rows * 2 * size), residual = random_bf16(rows * size);
    std::vector<float> weight(size);
    for (float& one : weight) one = uniform(0.5f, 2);
    const auto at = [&](int64_t row, int64_t i, int64_t width) { return to_float(x[row * width + i]); };

    Op op = {};
    op.kind = SILU, op.a = const_cast<bf16*>(x.data()), op.out = out.data(), op.i0 = size, op.stride_a = 2 * size, op.stride_out = size;
    run_op(op, step);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i++) {
            const double gate = at(row, i, 2 * size), wanted = gate / (1 + std::exp(-gate)) * at(row, size + i, 2 * size);
            expect_near(to_float(out[row * size + i]), wanted, 0.005 * std::abs(wanted) + 1e-6, "SILU");
        }

    std::vector<bf16> before = residual;
    op = {}, op.kind = NORM, op.a = const_cast<bf16*>(x.data()), op.b = residual.data(), op.c = weight.data(), op.out = out.data();
    op.stride_a = op.stride_b = op.stride_out = op.i0 = size, op.i1 = 1, op.f0 = 1e-6;
    run_op(op, step);
    for (int64_t row = 0; row < rows; row++) {
        double squares = 0;
        for (int64_t i = 0; i < size; i++) {
            const bf16 sum = narrowed(to_float(before[row * size + i]) + at(row, i, size));
            expect(residual[row * size + i] == sum, "NORM's residual");
            squares += to_float(sum) * to_float(sum);
        }
        for (int64_t i = 0; i < size; i++) {
            const double wanted = to_float(residual[row * size + i]) / std::sqrt(squares / size + 1e-6) * weight[i];
            expect_near(to_float(out[row * size + i]), wanted, 0.005 * std::abs(wanted) + 1e-6, "NORM");
        }
    }

    op = {}, op.kind = ADD, op.a = const_cast<bf16*>(x.data()), op.b = residual.data(), op.out = out.data(), op.i0 = size;
    op.stride_a = op.stride_b = op.stride_out = size;
    run_op(op, step);
    for (int64_t i = 0; i < rows * size; i++) expect(out[i] == narrowed(to_float(x[i]) + to_float(residual[i])), "ADD");

    op = {}, op.kind = FAKE_QUANTIZE, op.a = const_cast<bf16*>(x.data()), op.out = out.data(), op.i0 = op.stride_a = op.stride_out = size;
    run_op(op, step);
    for (int64_t row = 0; row < rows; row++) {
        double most = 0;
        for (int64_t i = 0; i < size; i++) most = std::max(most, std::abs(static_cast<double>(at(row, i, size))));
        for (int64_t i = 0; i < size; i++)
            expect_near(to_float(out[row * size + i]), at(row, i, size), 0.51 * most / 127 + 0.004 * most, "FAKE_QUANTIZE");
    }

    const int64_t vocab = 1000;  // no multiple of 16
    std::vector<bf16> logits = random_bf16(rows * vocab, 2);
    std::vector<int64_t> ids(rows);
    std::vector<uint8_t> nonfinite(rows);
    std::vector<int64_t> positions(rows, 5);
    step.positions = positions.data();
    logits[vocab + 997] = logits[vocab + 13] = narrowed(3), logits[2 * vocab + 1] = narrowed(NAN);
    op = {}, op.kind = GREEDY, op.a = logits.data(), op.b = nonfinite.data(), op.out = ids.data(), op.i0 = op.stride_a = vocab;
    run_op(op, step);
    expect(ids[1] == 13 && !nonfinite[0] && !nonfinite[1] && nonfinite[2], "GREEDY");
    std::vector<Draw> draws(rows, Draw{{1, 2}, 0.7f, -INFINITY, 0.9, 20});
    op.kind = DRAW, op.b = draws.data(), op.i4 = reinterpret_cast<int64_t>(nonfinite.data()), op.i1 = vocab;
    step.rows = 1;
    run_op(op, step);
    int64_t better = 0;
    for (int64_t i = 0; i < vocab; i++) better += to_float(logits[i]) > to_float(logits[ids[0]]);
    expect(better < 20 && !nonfinite[0], "DRAW takes one of the top 20");
}

// Attention of queries over a cache of one sequence. `count`: queries, the last tokens of `tokens`. `kind`: of the cache's numbers.
void check_attention(int64_t tokens, int64_t count, int64_t window, bool prompt, int64_t kind, int64_t group) {
    const int64_t dim = 64, kv_heads = 2, heads = kv_heads * group, token = 2 * kv_heads * dim;
    const int64_t page = 16, pages = (tokens + page - 1) / page;
    const std::string what = "ATTENTION of " + std::to_string(count) + " to " + std::to_string(tokens) + " tokens, cache " +
                             std::to_string(kind) + ", group " + std::to_string(group);
    std::vector<bf16> queries = random_bf16(count * heads * dim, 2), given = random_bf16(tokens * token), out(count * heads * dim);
    std::vector<bf16> cache(pages * page * token), scales(pages * page * 2 * kv_heads);
    std::vector<int32_t> table(pages);
    for (int64_t i = 0; i < pages; i++) table[i] = static_cast<int32_t>(pages - 1 - i);
    std::vector<int64_t> index(tokens);
    for (int64_t i = 0; i < tokens; i++) index[i] = table[i / page] * page + i % page;
    Step step = {};
    step.rows = tokens, step.index = index.data();
    Op op = {};
    op.kind = kind ? WRITE_8BIT : WRITE, op.a = given.data(), op.out = cache.data(), op.stride_a = token;
    op.i0 = kind ? dim : token, op.i1 = 2 * kv_heads, op.cache_type = kind, op.scales = scales.data();
    run_op(op, step);

    const int64_t offsets[] = {0, count}, lengths[] = {tokens};
    step = {}, step.rows = count, step.pages = table.data(), step.pages_stride = pages, step.lengths = lengths;
    step.sequences = 1, step.decodes = prompt ? 0 : 1, step.offsets = offsets, step.prompts = prompt;
    op = {}, op.kind = ATTENTION, op.a = queries.data(), op.b = cache.data(), op.out = out.data();
    op.stride_a = op.stride_out = heads * dim;
    op.i0 = dim, op.i1 = heads, op.i2 = kv_heads, op.i3 = window, op.i4 = page, op.f0 = 0.125, op.cache_type = kind, op.scales = scales.data();
    run_op(op, step);
    const auto value = [&](int64_t at, int64_t part, int64_t head, int64_t d) {
        return static_cast<double>(to_float(given[at * token + (part * kv_heads + head) * dim + d]));
    };
    for (int64_t q = 0; q < count; q++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t end = tokens - count + q + 1, first = window ? std::max<int64_t>(0, end - window) : 0;
            std::vector<double> sums(dim);
            double whole = 0;
            for (int64_t t = first; t < end; t++) {
                double score = 0;
                for (int64_t d = 0; d < dim; d++) score += to_float(queries[(q * heads + head) * dim + d]) * value(t, 0, head / group, d);
                const double weight = std::exp(score * 0.125);
                whole += weight;
                for (int64_t d = 0; d < dim; d++) sums[d] += weight * value(t, 1, head / group, d);
            }
            for (int64_t d = 0; d < dim; d++)
                expect_near(to_float(out[(q * heads + head) * dim + d]), sums[d] / whole, kind ? 0.06 : 0.02, what);
        }
}

}  // namespace

int main() {
    expect(troupe_ready(), "this processor lacks what it was compiled for");
    check_vectors();
    check_products();
    check_rows();
    for (int64_t group : {1, 2, 3, 8})
        for (int64_t kind : {BF16, INT8, E4M3, E5M2}) check_attention(150, 1, group == 2 ? 40 : 0, false, kind, group);
    check_attention(150, 3, 0, false, BF16, 2);
    check_attention(200, 70, 0, true, BF16, 2);
    check_attention(200, 70, 50, true, INT8, 2);
    if (failures) std::printf("%d checks failed\n", failures);
    return failures != 0;
}
