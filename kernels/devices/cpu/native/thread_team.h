// Threads that share the chunks of one operator after another.
//
// Chunks are claimed one by one, so a thread that the system has suspended delays its own chunk only.
// Helpers spin between the operators of a program, which are microseconds apart, and sleep between programs.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>
#include <thread>
#include <vector>

#include "vectors.h"

namespace troupe {

class Team {
  public:
    // Throws std::system_error.
    explicit Team(int threads) {
        try {
            for (int i = 1; i < threads; i++) helpers_.emplace_back([this, i] { help(i); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Team() { end(); }

    int size() const { return 1 + static_cast<int>(helpers_.size()); }

    // Let the helpers sleep. They wake up for the next chunks to share.
    void rest() { running_.store(false, std::memory_order_release); }

    // call(context, chunk, thread) for every chunk below `chunks`; returns when all are done. Throws std::bad_alloc where one
    // had no memory.
    void each(int64_t chunks, void (*call)(void*, int64_t, int), void* context) {
        if (helpers_.empty() || chunks < 2) {
            for (int64_t chunk = 0; chunk < chunks; chunk++) call(context, chunk, 0);
            return;
        }
        if (!running_.load(std::memory_order_relaxed)) {
            running_.store(true, std::memory_order_release);
            awake_.fetch_add(1);
            awake_.notify_all();
        }
        sequence_++;
        region_[sequence_ % 8] = {call, context, static_cast<uint32_t>(chunks)};
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(static_cast<uint64_t>(sequence_) << 32, std::memory_order_release);
        while (claim(0)) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; spins++) relax(spins);
        if (failed_.load(std::memory_order_relaxed)) failed_.store(false, std::memory_order_relaxed), throw std::bad_alloc();
    }

  private:
    struct Region {
        void (*call)(void*, int64_t, int);
        void* context;
        uint32_t chunks;
    };

    // A ticket is the region's number and its next chunk; while it can be taken, its region stands.
    bool claim(int thread) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            uint32_t chunk = static_cast<uint32_t>(ticket);
            Region region = region_[(ticket >> 32) % 8];
            if (chunk >= region.chunks) return false;
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                try {
                    region.call(region.context, chunk, thread);
                } catch (...) {  // in a helper it would end the process
                    failed_.store(true, std::memory_order_relaxed);
                }
                done_.fetch_add(1, std::memory_order_acq_rel);
                return true;
            }
        }
    }

    void end() {
        stop_.store(true);
        awake_.fetch_add(1);
        awake_.notify_all();
        for (auto& helper : helpers_) helper.join();
    }

    // The thread that it waits for may need this core.
    static int relax(int spins) {
        if (spins < 500) {
            pause();
        } else {
            std::this_thread::yield();
        }
        return spins;
    }

    void help(int thread) {
        uint32_t seen = 0;
        while (!stop_.load(std::memory_order_relaxed)) {
            awake_.wait(seen);
            seen = awake_.load();
            for (int spins = 0; running_.load(std::memory_order_acquire);) spins = claim(thread) ? 0 : relax(spins + 1);
        }
    }

    std::vector<std::thread> helpers_;
    Region region_[8] = {};
    uint32_t sequence_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> awake_{0};
    std::atomic<bool> running_{false};
    std::atomic<bool> stop_{false};
    std::atomic<bool> failed_{false};
};

}  // namespace troupe
