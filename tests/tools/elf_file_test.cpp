// Reading executables: right about whole ones, and harmless with broken ones.
#include "tools/elf_file.h"

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

namespace cushion {
namespace {

using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Not;

const std::string kFixtures = FIXTURES "/";

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Broken : public ::testing::Test {
 protected:
  ElfFile read(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
    return read_elf(path_);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ = ::testing::TempDir() + "broken_elf." + std::to_string(getpid());
  const std::string whole_ = bytes_of(kFixtures + "shared_runtime");
};

TEST(ElfFile, TellsHowAProgramIsLinked) {
  EXPECT_THAT(read_elf(kFixtures + "plain").interpreter, Not(IsEmpty()));
  EXPECT_THAT(read_elf(kFixtures + "static").interpreter, IsEmpty());
  EXPECT_FALSE(read_elf(kFixtures + "static").shared_library);
  EXPECT_THAT(read_elf(kFixtures + "shared_runtime").needed, Contains("libcudart.so.13"));
  EXPECT_FALSE(read_elf(kFixtures + "shared_runtime").static_cuda_runtime);
  EXPECT_TRUE(read_elf(kFixtures + "static_runtime").static_cuda_runtime);
  EXPECT_TRUE(read_elf(kFixtures + "driver").needs("libcuda.so"));
  EXPECT_TRUE(read_elf(kFixtures + "libcudart.so.13").shared_library);
}

TEST_F(Broken, OtherFilesAreNoPrograms) {
  EXPECT_EQ(read_elf(kFixtures + "nonesuch").problem, std::strerror(ENOENT));
  EXPECT_EQ(read("").problem, "not an ELF file");
  EXPECT_EQ(read("text\n").problem, "not an ELF file");
  EXPECT_THAT(read(whole_.substr(0, 20)).problem, Not(IsEmpty()));
}

TEST_F(Broken, AnyTruncationIsSafe) {
  for (std::size_t size = 0; size < whole_.size(); size += size < 1024 ? 7 : 501) read(whole_.substr(0, size));
  EXPECT_THAT(read(whole_).problem, IsEmpty());
}

TEST_F(Broken, AnyChangeOfTheHeadersIsSafe) {
  std::mt19937 random(1);
  for (int round = 0; round < 1000; ++round) {
    std::string bytes = whole_;
    for (int change = 0; change < 8; ++change) {
      bytes[4 + random() % 1020] = static_cast<char>(random());
    }
    read(bytes);
  }
}

// The fields an attacker would reach for: offsets and sizes at the ends of their range.
TEST_F(Broken, ExtremeOffsetsAndSizesAreSafe) {
  Elf64_Ehdr header;
  std::memcpy(&header, whole_.data(), sizeof header);
  for (const std::uint64_t extreme : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{whole_.size()},
                                      std::uint64_t{INT64_MAX}, std::uint64_t{1} << 63, UINT64_MAX - 1, UINT64_MAX}) {
    for (unsigned i = 0; i < header.e_phnum; ++i) {
      for (const std::size_t field :
           {offsetof(Elf64_Phdr, p_offset), offsetof(Elf64_Phdr, p_vaddr), offsetof(Elf64_Phdr, p_filesz)}) {
        std::string bytes = whole_;
        std::memcpy(bytes.data() + header.e_phoff + i * sizeof(Elf64_Phdr) + field, &extreme, sizeof extreme);
        read(bytes);
      }
    }
    for (const std::size_t field : {offsetof(Elf64_Ehdr, e_phoff), offsetof(Elf64_Ehdr, e_shoff)}) {
      std::string bytes = whole_;
      std::memcpy(bytes.data() + field, &extreme, sizeof extreme);
      read(bytes);
    }
  }
}

}  // namespace
}  // namespace cushion
