// Token ids by llama.cpp's own tokenizer: of a GGUF file and of texts on stdin, one a line in hexadecimal.
#include <iostream>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama-model-loader.h"
#include "llama-vocab.h"

// Of parts of llama.cpp that no tokenizer needs.
ggml_backend_dev_t ggml_backend_dev_by_type(enum ggml_backend_dev_type) { return nullptr; }
int32_t llama_split_path(char *, size_t, const char *, int32_t, int32_t) { return 0; }
int32_t llama_split_prefix(char *, size_t, const char *, int32_t, int32_t) { return 0; }

int main(int, char ** arguments) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    std::vector<std::string> parts;
    try {
        llama_model_loader loader(nullptr, nullptr, nullptr, arguments[1], parts, nullptr, LLAMA_LOAD_MODE_NONE, false, true, false,
                                  nullptr, nullptr);
        llama_vocab vocab;
        vocab.load(loader, LLM_KV(loader.get_arch()));
        for (std::string line; std::getline(std::cin, line);) {
            std::string text;
            for (size_t at = 0; at + 1 < line.size(); at += 2) {
                text += static_cast<char>(std::stoi(line.substr(at, 2), nullptr, 16));
            }
            for (const auto id : vocab.tokenize(text, true, true)) {
                std::cout << id << ' ';
            }
            std::cout << '\n';
        }
    } catch (const std::exception & error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
