// Memory that is used again.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace troupe {

// Memory of a cache line's alignment that grows as it is needed, and keeps nothing of what it held when it does.
template <class T>
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    ~Scratch() { std::free(held_); }

    T* of(int64_t size) {
        if (size > size_) {
            std::free(held_);
            size_ = 0;
            held_ = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64));
            if (!held_) throw std::bad_alloc();
            size_ = size;
        }
        return held_;
    }

  private:
    T* held_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace troupe
