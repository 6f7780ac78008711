// Model files that the llama.cpp host must refuse, each with a sentence that says why.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "decoder.hpp"
#include "host_fixtures.hpp"
#include "sekv/core/error.hpp"
#include "tiny_model.hpp"

namespace sekv::example {
namespace {

class BadFile : public testing::Test {
protected:
    std::string write_bytes(std::string_view bytes) {
        const auto path = directory_.file("bad.gguf");
        std::ofstream(path, std::ios::binary) << bytes;
        return path;
    }
    /// A GGUF with one small tensor; `edit` adds keys.
    std::string write_gguf(const std::string& architecture, const std::function<void(gguf_context*)>& edit = {}) {
        const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(ggml_init({std::size_t{1} << 16, nullptr, false}), ggml_free);
        const std::unique_ptr<gguf_context, decltype(&gguf_free)> g(gguf_init_empty(), gguf_free);
        if (!architecture.empty()) gguf_set_val_str(g.get(), "general.architecture", architecture.c_str());
        if (edit) edit(g.get());
        auto* t = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 8);
        ggml_set_name(t, "token_embd.weight");
        std::fill_n(static_cast<float*>(t->data), 8, 0.5F);
        gguf_add_tensor(g.get(), t);
        auto path = directory_.file("bad.gguf");
        gguf_write_to_file(g.get(), path.c_str(), false);
        return path;
    }
    template <class Error>
    std::string refusal(const std::string& path) {
        return message_of<Error>([&] { llama_host(path, one_thread()); });
    }
    scratch_directory directory_;
};

TEST_F(BadFile, MissingOrDirectory) {
    EXPECT_HAS(refusal<io_error>("/nonexistent/model.gguf"), "doesn't exist");
    EXPECT_HAS(refusal<io_error>("/tmp"), "isn't a regular file");
}

TEST_F(BadFile, NoGguf) {
    EXPECT_HAS(refusal<format_error>(write_bytes("A letter about the weather, not a model.\n")), "isn't a GGUF");
    EXPECT_HAS(refusal<format_error>(write_bytes("")), "isn't a GGUF");
    EXPECT_HAS(refusal<format_error>(write_bytes("GGUF")), "damaged or cut short");
}

TEST_F(BadFile, CutShort) {
    const auto path = directory_.file("tiny.gguf");
    tiny_model_writer({}).write(path);
    const auto size = std::filesystem::file_size(path);
    for (const auto keep : {size - 1000, size / 2}) {
        std::filesystem::resize_file(path, keep);
        EXPECT_HAS(refusal<format_error>(path), "is cut short");
    }
    std::filesystem::resize_file(path, 300);
    EXPECT_HAS(refusal<format_error>(path), "damaged or cut short");
}

TEST_F(BadFile, RecurrentModel) {
    EXPECT_HAS(refusal<unsupported>(write_gguf("mamba")), "running state");
    EXPECT_HAS(refusal<unsupported>(write_gguf("rwkv7")), "running state");
    EXPECT_HAS(refusal<unsupported>(write_gguf("jamba", [](auto* g) { gguf_set_val_u32(g, "jamba.ssm.conv_kernel", 4); })), "running state");
}

TEST_F(BadFile, LatentAttention) {
    EXPECT_HAS(refusal<unsupported>(write_gguf("deepseek2", [](auto* g) { gguf_set_val_u32(g, "deepseek2.attention.kv_lora_rank", 512); })),
               "latent attention");
}

TEST_F(BadFile, EncoderUnknownArchitectureOrNoModel) {
    EXPECT_HAS(refusal<unsupported>(write_gguf("bert", [](auto* g) { gguf_set_val_bool(g, "bert.attention.causal", false); })), "encoder");
    EXPECT_HAS(refusal<unsupported>(write_gguf("sundial")), "sundial");
    EXPECT_HAS(refusal<format_error>(write_gguf("")), "names no architecture");
    EXPECT_HAS(refusal<format_error>(write_gguf("llama", [](auto* g) { gguf_set_val_str(g, "general.type", "adapter"); })), "adapter");
}

TEST_F(RealModel, FirstMegabyteAloneIsRefused) {
    const auto cut = directory_.file("cut.gguf");
    std::filesystem::copy_file(path_, cut);
    std::filesystem::resize_file(cut, 1 << 20);
    EXPECT_THROW(llama_host(cut, one_thread()), format_error);
}

TEST_F(RealModel, LongerThanItsContextIsRefused) {
    const auto trained = llama_host(path_, one_thread(64)).trained_context();
    EXPECT_THROW(llama_host(path_, one_thread(trained + 1)), invalid_argument);
    const llama_host host(path_, one_thread(64));
    exact_provider provider(host.shape());
    hosted_decoder hosted(host, provider);
    EXPECT_THROW(hosted.decode(some_tokens(host, 65), 0, logits_of::last), invalid_argument);
}

}  // namespace
}  // namespace sekv::example
