#include "graphs.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace pi {
namespace {

bool wanted() {
    const char *value = std::getenv("PI_GPU_GRAPHS");
    return value == nullptr || std::strcmp(value, "0") != 0;
}

} // namespace

GpuGraphs::GpuGraphs(const GpuDevice &device) : device_(device), enabled_(wanted()) {}

GpuGraphs::~GpuGraphs() {
    make_room(0);
}

// Leaves the n last used.
void GpuGraphs::make_room(size_t n) noexcept {
    while (series_.size() > n) {
        // A failure here is one that synchronize() has told, or will tell.
        if (series_.back().graph != nullptr)
            static_cast<void>(device_.try_release_graph(series_.back().graph));
        series_.pop_back();
    }
}

void GpuGraphs::launch(const Series &series) {
    device_.call(&pi_gpu_api::launch_graph, series.graph);
    ++n_launches_;
}

Graph GpuGraphs::begin(const GraphKey &key, FfnCounts &counts) {
    if (!enabled_)
        return Graph::none;
    const auto found =
        std::find_if(series_.begin(), series_.end(), [&](const Series &one) { return one.key == key; });
    if (found == series_.end()) {
        make_room(most_series_ - 1);
        series_.push_front({key, nullptr, {}});
        return Graph::none;
    }
    series_.splice(series_.begin(), series_, found);
    Series &series = series_.front();
    if (series.graph == nullptr) {
        device_.call(&pi_gpu_api::begin_capture);
        before_ = counts;
        return Graph::recording;
    }
    launch(series);
    counts.total += series.counts.total;
    counts.guessed += series.counts.guessed;
    counts.active += series.counts.active;
    return Graph::replayed;
}

bool GpuGraphs::end(FfnCounts &counts) {
    Series &series = series_.front();
    const int32_t status = device_.try_end_capture(&series.graph);
    if (status == PI_DOES_NOT_FIT) {
        enabled_ = series_.size() > 1; // with fewer others it may fit
        if (!enabled_)
            log(LogLevel::warning, std::string(device_.api().error()) + "; steps run without graphs");
        most_series_ = std::max<size_t>(series_.size() / 2, 1);
        make_room(most_series_);
        counts = before_;
        return false;
    }
    check_gpu(device_.api(), status);
    series.counts = {counts.total - before_.total, counts.guessed - before_.guessed,
                     counts.active - before_.active};
    launch(series);
    return true;
}

void GpuGraphs::abandon() noexcept {
    static_cast<void>(device_.try_end_capture(nullptr));
}

} // namespace pi
