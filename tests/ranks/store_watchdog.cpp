// Calls a store from a thread of C++, as the watchdogs of ProcessGroupNCCL do.
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace {

class Watchdog {
 public:
  Watchdog(c10::intrusive_ptr<c10d::Store> store, std::string key)
      : store_(std::move(store)), key_(std::move(key)), thread_([this] { look(); }) {}

  ~Watchdog() {
    if (thread_.joinable()) thread_.detach();
  }

  long looks() const { return looks_; }

  void stop() {
    over_ = true;
    pybind11::gil_scoped_release release;
    thread_.join();
  }

 private:
  void look() {
    while (!over_) {
      store_->check({key_});
      store_->set(key_ + "/seen", std::vector<uint8_t>{1});
      store_->get(key_ + "/seen");
      ++looks_;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string key_;
  std::atomic<bool> over_{false};
  std::atomic<long> looks_{0};
  std::thread thread_;
};

}  // namespace

PYBIND11_MODULE(store_watchdog, module) {
  pybind11::class_<Watchdog>(module, "Watchdog")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Store>, std::string>())
      .def("looks", &Watchdog::looks)
      .def("stop", &Watchdog::stop);
}
