#!/bin/sh
# Compile llama.cpp's tokenizer alone: build.sh SOURCE PROGRAM, where SOURCE is a folder of llama.cpp's source.
set -eu
here=$(dirname "$0") source=$1 program=$2
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
: > "$objects/ggml-version.h"
flags="-O1 -D_GNU_SOURCE -DGGML_VERSION=\"\" -DGGML_COMMIT=\"\" -I$objects -I$source/include -I$source/src -I$source/ggml/include -I$source/ggml/src"
for name in ggml.c ggml-alloc.c ggml-quants.c; do
  cc -std=c11 $flags -c "$source/ggml/src/$name" -o "$objects/$name.o"
done
for name in ggml/src/ggml.cpp ggml/src/ggml-backend.cpp ggml/src/ggml-backend-meta.cpp ggml/src/ggml-threading.cpp \
  ggml/src/gguf.cpp src/llama-vocab.cpp src/unicode.cpp src/unicode-data.cpp src/llama-arch.cpp src/llama-hparams.cpp \
  src/llama-mmap.cpp src/llama-impl.cpp src/llama-model-loader.cpp; do
  c++ -std=c++17 $flags -c "$source/$name" -o "$objects/$(basename "$name").o"
done
c++ -std=c++17 $flags -c "$here/llama_tokens.cpp" -o "$objects/llama_tokens.o"
c++ "$objects"/*.o -lpthread -o "$program"
