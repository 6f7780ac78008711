// New sketch generations: key bases fitted on what R2 decodes to, against the host library on the same rows; tolerances as in seal_test.cpp.
#include <gtest/gtest.h>

#include "seal_checks.hpp"

namespace sekv::cuda::seal_tests {
namespace {

// A sequence of the world's sealed blocks, for a second sketch generation.
struct sealed_sequence {
    explicit sealed_sequence(const seal_world& w) {
        std::vector<sealed_block> list;
        for (std::size_t b = 0; b < w.sketches.size(); ++b) {
            sealed_block x;
            x.sketch = w.sketches[b], x.lines = w.lines[b], x.begin = w.pages.blocks[b].begin, x.count = w.pages.blocks[b].count, x.epoch = 1;
            list.push_back(x);
        }
        blocks = std::make_unique<array<sealed_block>>(list);
        epochs = std::make_unique<array<epoch_ref>>(std::vector<epoch_ref>{{}, {w.epoch_buffer.get(), w.key_buffer.get()}});
        sequence_view v;
        v.sealed_count = static_cast<std::int32_t>(list.size()), v.sealed = blocks->get(), v.epochs = epochs->get(), v.epoch_count = 2;
        view = std::make_unique<array<sequence_view>>(std::vector<sequence_view>{v});
    }
    std::unique_ptr<array<sealed_block>> blocks;
    std::unique_ptr<array<epoch_ref>> epochs;
    std::unique_ptr<array<sequence_view>> view;
};

// Keys of one head's blocks [first, end) about the epoch's mean, as R2 decodes them.
floats decoded_keys(const seal_world& w, std::int32_t head, std::int32_t first, std::int32_t end) {
    const auto c = w.codec(head);
    floats rows;
    for (std::int32_t b = first; b < end; ++b) {
        const auto codes = line_components(c.key_lines, w.block_lines(head, b).data(), w.layer, w.pages.blocks[static_cast<std::size_t>(b)].count, c.dk, 0);
        const auto keys = times(codes, transposed(c.a, c.dk), c.dk);
        rows.insert(rows.end(), keys.begin(), keys.end());
    }
    return rows;
}

void expect_refit(const shape& s, std::int32_t first, std::int32_t end, std::int32_t skip) {
    seal_world w(s);
    w.seal();
    const sealed_sequence sequence(w);
    std::vector<std::vector<std::uint8_t>> before;
    for (const auto& page : w.sketch_pages) before.push_back(page.read());
    const array<std::byte> keys(w.bases().key_device_bytes()), encoder(w.bases().key_host_bytes(), true), workspace(seal_workspace_bytes(w.workspace_shape()));
    std::vector<double> metric;  // of other queries
    for (std::int32_t h = s.kv_heads - 1; h >= 0; --h) {
        const auto m = w.head_metric(h);
        metric.insert(metric.end(), m.rbegin(), m.rend());
    }
    const owned_stream stream;
    sealer seal(w.workspace_shape(), workspace.get(), stream.get());
    seal.refit_keys(w.layer, sequence.view->get(), first, end - first, skip, metric.data(), 1, keys.get(), encoder.get(), w.sketches.data() + first);
    for (std::int32_t h = 0; h < s.kv_heads; ++h) {
        const auto rows = decoded_keys(w, h, first, end);
        const auto n = static_cast<std::int64_t>(rows.size()) / s.dk - skip;
        const auto d = static_cast<std::ptrdiff_t>(s.dk * s.dk);
        const auto want = fit_keys(from_row(rows, skip, s.dk).data(), n, s.dk, {metric.begin() + d * h, metric.begin() + d * (h + 1)}, 1);
        const auto got = w.codec(h, keys, encoder);
        std::int32_t alive = 0;  // components that R2 doesn't decode to zero
        while (alive < s.dk && want.variance[static_cast<std::size_t>(alive)] > 1e-7 * want.variance[0]) ++alive;
        expect_same_basis(got.encoder, want.b, s.dk, false, alive, 1e-3, "B");
        expect_same_basis(got.a, want.a, s.dk, false, alive, 2e-3, "A");
        const auto codes = times(rows, got.encoder, s.dk);
        const auto sketch = fit_sketch(from_row(codes, skip, s.dk).data(), n, s.dk, want.variance, w.layer.key_bits);
        EXPECT_EQ(got.keys.bits, sketch.bits);
        expect_close(got.keys.step, sketch.step, 0, 1e-4, "step");
        expect_close(got.keys.error, sketch.error, 1e-7 * want.variance[0], 1e-4, "error");
        code_counts counts;
        std::int64_t row = 0;
        for (auto b = first; b < end; ++b) {
            const auto count = w.pages.blocks[static_cast<std::size_t>(b)].count;
            std::vector<std::uint8_t> planes(static_cast<std::size_t>(w.layer.key_planes * plane_bytes), 0);
            pack_sketch(from_row(codes, row, s.dk).data(), count, s.dk, sketch.fields, sketch.bits.data(), sketch.step.data(), planes.data());
            compare_planes(sketch, w.planes(h, b).data(), planes.data(), counts);
            row += count;
        }
        EXPECT_LE(counts.different, counts.all / 500 + 1) << "of " << counts.all << " codes";
    }
    for (std::size_t b = 0; b < before.size(); ++b) {  // every byte but the refitted blocks' key planes is as it was
        const auto now = w.sketch_pages[b].read();
        const bool refitted = static_cast<std::int32_t>(b) >= first && static_cast<std::int32_t>(b) < end;
        std::size_t changed = 0;
        for (std::size_t i = 0; i < now.size(); ++i) {
            const auto at = i < w.layer.sketch_page.first ? now.size() : (i - w.layer.sketch_page.first) % std::max<std::uint64_t>(1, w.layer.sketch_page.stride);
            const auto in_head = s.kv_heads == 1 ? i - std::min<std::size_t>(i, w.layer.sketch_page.first) : at;
            const bool key = refitted && i >= w.layer.sketch_page.first && in_head < static_cast<std::size_t>(w.layer.key_planes * plane_bytes);
            changed += key && now[i] != before[b][i];
            ASSERT_TRUE(key || now[i] == before[b][i]) << "block " << b << ", byte " << i;
        }
        EXPECT_EQ(changed > 0, refitted);
    }
}

TEST(SealRefit, FitsOnWhatLinesDecodeTo) {
    expect_refit(make(dtype::bf16, 2, 64, 64, {64, 64, 64, 64, 64, 37}, 128), 0, 6, 4);
    expect_refit(make(dtype::f16, 1, 128, 64, {64, 64, 64, 64, 64, 64, 64, 64}, 64), 2, 7, 0);
    expect_refit(make(dtype::bf16, 2, 80, 96, {64, 20, 64, 64, 64, 64}, 512), 0, 5, 4);
}

}  // namespace
}  // namespace sekv::cuda::seal_tests
