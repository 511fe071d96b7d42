// Calls the kernel with what it reads from one file, and writes its output and log-sum-exps into another.

#include <stdint.h>
#include <stdio.h>

#include <vector>

extern "C" void prefill_forest_attention(const void*, const void*, const void*, void*, float*, const int64_t*, int64_t,
                                         const int64_t*, const int64_t*, int64_t, float, float, int64_t);

int main(int, char** names) {
    FILE *from = fopen(names[1], "rb"), *to = fopen(names[2], "wb");
    std::vector<char> parts[8];  // query, key, value, output, log-sum-exps, blocks, runs, sizes
    int64_t bytes, halves;
    float factors[2];
    for (auto& part : parts) {
        if (fread(&bytes, 8, 1, from) != 1) return 1;
        part.resize(bytes);
        if (fread(part.data(), 1, bytes, from) != (size_t)bytes) return 1;
    }
    if (fread(factors, 4, 2, from) != 2 || fread(&halves, 8, 1, from) != 1) return 1;
    prefill_forest_attention(parts[0].data(), parts[1].data(), parts[2].data(), parts[3].data(), (float*)parts[4].data(),
                             (int64_t*)parts[5].data(), parts[5].size() / 48, (int64_t*)parts[6].data(),
                             (int64_t*)parts[7].data(), 2, factors[0], factors[1], halves);
    for (int i = 3; i < 5; i++)
        if (fwrite(parts[i].data(), 1, parts[i].size(), to) != parts[i].size()) return 1;
    return fclose(to);
}
