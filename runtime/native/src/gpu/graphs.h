// graphs.h: series of operations that the device has recorded, kept by what they were recorded for.
#pragma once

#include "../ops.h"
#include "library.h"

#include <list>

namespace pi {

// The least recently used series is forgotten for a new one.
class GpuGraphs {
  public:
    // enabled: false for $PI_GPU_GRAPHS=0 (comparisons): every series is queued.
    explicit GpuGraphs(const GpuDevice &device);
    ~GpuGraphs();
    GpuGraphs(const GpuGraphs &) = delete;
    GpuGraphs &operator=(const GpuGraphs &) = delete;

    // Launches the series of this key and adds its counts; or says what to do with its operations. The first
    // time they are queued as they are, so that a shape that never comes back costs nothing.
    Graph begin(const GraphKey &key, FfnCounts &counts);
    // The operations since begin() become the series of its key, and are done; counts: as they are now.
    // False, and counts as they were, where the device has no room for the graph: its operations are undone.
    bool end(FfnCounts &counts);
    void abandon() noexcept;
    uint64_t n_launches() const { return n_launches_; }

  private:
    struct Series {
        GraphKey key;
        pi_gpu_graph *graph = nullptr; // null: seen once
        FfnCounts counts;              // that its operations add on the host
    };

    void launch(const Series &series);
    void make_room(size_t n) noexcept;

    const GpuDevice &device_;
    bool enabled_;
    size_t most_series_ = 16;  // fewer where their memory is short
    std::list<Series> series_; // the last used first
    FfnCounts before_;
    uint64_t n_launches_ = 0;
};

} // namespace pi
