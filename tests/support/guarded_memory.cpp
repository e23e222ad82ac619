// An allocator for torch's host memory that finds writes beyond a tensor.
//
// Each block ends where a page without access begins, so a write past it stops the process at once.
// The few bytes that alignment leaves between block and page, and those before the block, have a
// pattern that is compared when the block is freed.

#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr size_t kAlign = 64;  // torch's own
constexpr unsigned char kPattern = 0xA5;

struct Block {
  unsigned char* map;
  size_t mapped;  // bytes, with the page that has no access
  unsigned char* data;
  size_t nbytes;
};

void check(const unsigned char* from, const unsigned char* to, const char* where) {
  for (; from < to; ++from) {
    if (*from != kPattern) {
      std::fprintf(stderr, "guarded_memory: a write %s a tensor\n", where);
      std::abort();
    }
  }
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  check(block->map, block->data, "before");
  check(block->data + block->nbytes, block->map + block->mapped - getpagesize(), "beyond");
  munmap(block->map, block->mapped);
  delete block;
}

class GuardedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    }
    size_t page = getpagesize();
    size_t room = (nbytes + kAlign - 1) / kAlign * kAlign;
    size_t pages = (room + page - 1) / page * page;
    void* map = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(map != MAP_FAILED, "guarded_memory: not enough memory: ", nbytes, " bytes");
    auto* start = static_cast<unsigned char*>(map);
    TORCH_CHECK(mprotect(start + pages, page, PROT_NONE) == 0, "guarded_memory: mprotect");
    unsigned char* data = start + pages - room;
    std::memset(start, kPattern, data - start);
    std::memset(data + nbytes, kPattern, room - nbytes);
    auto* block = new Block{start, pages + page, data, nbytes};
    return {data, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

GuardedAllocator allocator;

}  // namespace

extern "C" void install() { c10::SetAllocator(c10::DeviceType::CPU, &allocator, 255); }
