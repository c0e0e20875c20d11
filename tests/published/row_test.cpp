#include <gtest/gtest.h>

#include "benchmarks/published/predict.h"
#include "benchmarks/published/row_cluster.h"
#include "benchmarks/published/row_model.h"
#include "benchmarks/published/row_strategy.h"
#include "tests/support/error_text.h"

namespace echelon::row_test {

StepRow dense() {
  StepRow row;
  row.gpu = "A100-SXM-80GB";
  row.gpus = 64;
  row.model = "GPT 18B";
  row.layers = 40;
  row.hidden = 6144;
  row.heads = 48;
  row.seq = 2048;
  row.global_batch = 64;
  row.microbatch_size = 2;
  row.tp = 8;
  row.pp = 2;
  row.recompute = "full";
  row.source = "arXiv:2104.04473 (SC21) Table 1";
  return row;
}

std::string error_of(const StepRow& row) {
  return predict(row).excluded;
}

cost::Strategy strategy(const StepRow& row) {
  return strategy_of(row, model_of(row), cluster_of(row));
}

TEST(StepRow, NamesColumnsThatAreMissing) {
  EXPECT_TRUE(error_text<DataError>([] {
                step_rows(parse_csv("gpu,model,tp\nA100,x,1\n", "t.csv"));
              }).starts_with("t.csv:1: no column gpus, seq, global_batch"));
}

TEST(StepRow, ReadsCellsAndKeepsTheFirstWrongOne) {
  const auto rows = step_rows(parse_csv(
      "seq,gpu,gpus,model,global_batch,tp,pp,step_seconds,extra\n"
      "2048, H100 ,8,llama3-8b,16.0,-,2,1.5,x\n"
      "2048,H100,8,llama3-8b,16,two,1,fast,x\n"
      "2048,H100,8.5,llama3-8b,-4,1,1,,x\n",
      "t.csv"));
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].gpu, "H100");
  EXPECT_EQ(rows[0].global_batch, 16);
  EXPECT_EQ(rows[0].tp, 0);
  EXPECT_EQ(rows[0].step_seconds, 1.5);
  EXPECT_EQ(rows[0].wrong, "");
  EXPECT_EQ(rows[1].number, 2);
  EXPECT_EQ(rows[1].wrong, "tp \"two\" is no whole number");
  EXPECT_EQ(rows[2].wrong, "gpus \"8.5\" is no whole number");
  EXPECT_EQ(error_of(rows[1]), rows[1].wrong);
}

TEST(RowCluster, FindsDevices) {
  for (const auto& [cell, name] :
       std::vector<std::pair<std::string, std::string>>{
           {"A100-SXM-80GB", "a100-80gb"},
           {"A100-80GB", "a100-80gb"},
           {"A100", "a100-80gb"},
           {"NVIDIA A100-SXM4-40GB", "a100-40gb"},
           {"A100 (DGX-A100, 2020 => 40GB)", "a100-40gb"},
           {"V100-32GB (DGX-2)", "v100"},
           {"H100", "h100-sxm"},
           {"H100-SXM-80GB", "h100-sxm"},
           {"H100 PCIe", "h100-pcie"},
           {"H100-SXM-94GB-HBM2e-500W", "h100-96gb"},
           {"H200-SXM-141GB", "h200"},
           {"GB200", "gb200"},
           {"B200", "b200"},
           {"RTX 4090", "rtx-4090"},
           {"MI300X", "mi300x"}}) {
    EXPECT_EQ(device_of(cell), name) << cell;
  }
  EXPECT_THROW(device_of("TPU v5"), ConfigError);
}

TEST(RowCluster, ReadsTheNetwork) {
  StepRow row = dense();
  EXPECT_EQ(cluster_of(row).num_devices(), 64);
  EXPECT_EQ(cluster_of(row).num_nodes(), 8);
  const auto network = [&] {
    return cluster_of(row).node_of(0).network.bytes_per_second;
  };
  row.notes = "8xA100 nodes, 4x Omni-Path 100 Gb/s per node; x";
  EXPECT_EQ(network(), 4 * 100e9 / 8 / 8);
  row.notes = "4x HDR 200 Gb/s IB per node (800 Gb/s)";
  EXPECT_EQ(network(), 4 * 200e9 / 8 / 8);
  row.notes = "";
  row.table = "A100 40GB with 1600 Gbps node-node interconnect (RoCE)";
  EXPECT_EQ(network(), 1600e9 / 8 / 8);
  row.table = "H100 2.4TB/s, 500W cap, 400Gb/s RDMA per GPU";
  EXPECT_EQ(network(), 400e9 / 8);
  row.gpu = "V100-32GB (DGX-2)";
  EXPECT_EQ(cluster_of(row).num_nodes(), 4);
  row.gpu = "GB200";
  EXPECT_EQ(cluster_of(row).num_nodes(), 1);
  row.gpus = 256;
  EXPECT_EQ(cluster_of(row).num_nodes(), 4);  // of 64
  row.gpus = 144;
  EXPECT_EQ(cluster_of(row).num_nodes(), 2);  // of 72
}

TEST(RowModel, FamiliesAndTheCatalogue) {
  const auto gpt = *model_of(dense()).transformer;
  EXPECT_FALSE(gpt.gated);
  EXPECT_TRUE(gpt.tied);
  EXPECT_EQ(gpt.vocab, 50257);
  EXPECT_EQ(gpt.positions, 2048);
  EXPECT_EQ(gpt.ffn, 4 * 6144);
  StepRow row = dense();
  row.model = "llama-34b";
  row.ffn = 16384;
  row.vocab = 32016;
  const auto llama = *model_of(row).transformer;
  EXPECT_TRUE(llama.gated);
  EXPECT_FALSE(llama.tied);
  EXPECT_EQ(llama.vocab, 32016);
  EXPECT_EQ(llama.ffn, 16384);
  row.model = "unheard-of";
  EXPECT_TRUE(model_of(row).transformer->gated);
  StepRow proxy = dense();
  proxy.model = "llama3.1-405b@7L";
  proxy.layers = 7;
  proxy.hidden = 16384;
  proxy.heads = 128;
  proxy.kv_heads = 8;
  const auto seven = *model_of(proxy).transformer;
  EXPECT_EQ(seven.layers, 7);
  EXPECT_EQ(seven.ffn, 53248);
  EXPECT_TRUE(seven.gated);
  StepRow experts = dense();
  experts.model = "mine-8x3b";
  EXPECT_EQ(model_of(experts).transformer->experts.experts, 8);
  experts.model = "mine-30b-a3b";
  EXPECT_THROW(model_of(experts), ConfigError);
  StepRow bare = dense();
  bare.model = "unheard-of";
  bare.hidden = 0;
  EXPECT_NE(error_of(bare).find("does not say its hidden"), std::string::npos);
}

TEST(RowStrategy, DerivesWhatCellsLeaveOut) {
  const auto derived = strategy(dense());
  EXPECT_EQ(derived.framework, "megatron-2021");
  EXPECT_EQ(derived.layout.data_degree(), 4);
  EXPECT_EQ(derived.num_microbatches(), 8);
  EXPECT_EQ(derived.layout.order.front(), Axis::pp);
  EXPECT_EQ(derived.schedule, ScheduleKind::one_f_one_b);
  EXPECT_EQ(derived.recompute, cost::Recompute::all);
  EXPECT_FALSE(derived.sequence_parallel);
  EXPECT_EQ(derived.zero_stage, 0);

  StepRow row = dense();
  row.virtual_stages = 5;
  row.recompute = "selective";
  row.sharding = "distributed optimizer (zero1)";
  row.precision = "fp16/bf16 mixed";
  const auto interleaved = strategy(row);
  EXPECT_EQ(interleaved.schedule, ScheduleKind::interleaved);
  EXPECT_EQ(interleaved.stages_per_rank, 5);
  EXPECT_TRUE(interleaved.sequence_parallel);
  EXPECT_EQ(interleaved.zero_stage, 1);
  EXPECT_EQ(interleaved.layout.dp_shard, 4);
  EXPECT_EQ(interleaved.precision, cluster::Precision::bf16);

  row.virtual_stages = 0;
  for (const auto& [cell, kind] :
       std::vector<std::pair<std::string, ScheduleKind>>{
           {"ZB-1p", ScheduleKind::zb_h1},
           {"ZB-2p*", ScheduleKind::zb_h2},
           {"ZB-V", ScheduleKind::zb_v},
           {"1F1B", ScheduleKind::one_f_one_b},
           {"1F1B-I", ScheduleKind::interleaved},
           {"GPipe", ScheduleKind::gpipe}}) {
    row.schedule = cell;
    EXPECT_EQ(strategy(row).schedule, kind) << cell;
  }
}

TEST(RowStrategy, ShardsAsTheCellSays) {
  StepRow row = dense();
  row.tp = row.pp = 1;
  row.global_batch = 128;
  row.sharding = "fsdp 16 x dp 4 (zero3-style)";
  EXPECT_EQ(strategy(row).layout.dp_shard, 16);
  EXPECT_EQ(strategy(row).layout.dp_replicate, 4);
  EXPECT_EQ(strategy(row).zero_stage, 3);
  row.sharding = "fsdp SHARD_GRAD_OP (zero2)";
  EXPECT_EQ(strategy(row).layout.dp_shard, 64);
  EXPECT_EQ(strategy(row).zero_stage, 2);
}

TEST(RowStrategy, SaysWhichCellsAreWrong) {
  const struct {
    int64_t StepRow::*cell;
    int64_t value;
    const char* says;
  } cases[] = {
      {&StepRow::tp, 7, "tp=7 * pp=2 * cp=1 does not divide gpus=64"},
      {&StepRow::dp, 5,
       "tp=8 * pp=2 * cp=1 * dp=5 is not gpus=64: dp would be 4"},
      {&StepRow::microbatch_size, 5,
       "global_batch=64 is no multiple of dp=4 * microbatch_size=5"},
      {&StepRow::virtual_stages, 100000,
       "pp=2 with 100000 virtual stages: 1024 stages are the most"},
      {&StepRow::seq, 0, "the row does not say its seq"},
      {&StepRow::gpus, 0, "the row does not say how many gpus"}};
  for (const auto& one : cases) {
    StepRow row = dense();
    row.*one.cell = one.value;
    EXPECT_EQ(error_of(row), one.says);
  }
  StepRow experts = dense(), images = dense();
  experts.ep = 3;
  experts.model = "x-8x7b";
  EXPECT_EQ(error_of(experts), "ep=3 does not divide dp=4");
  images.model = "resnet50";
  EXPECT_EQ(
      error_of(images),
      "model resnet50 is no transformer: rows of images have no columns");
  for (const auto member :
       {&StepRow::precision, &StepRow::recompute, &StepRow::schedule,
        &StepRow::sharding}) {
    StepRow row = dense();
    row.*member = "quux";
    const auto error = error_of(row);
    EXPECT_NE(error.find("\"quux\" is not understood"), std::string::npos)
        << error;
  }
}

TEST(RowStrategy, FrameworksByWordsElseByWhatIsUsual) {
  const struct {
    const char *source, *gpu, *sharding, *framework;
  } cases[] = {
      {"github mosaicml/llm-foundry", "A100", "", "fsdp"},
      {"arXiv:2401.10241 (Zero Bubble …", "A100", "", "zero-bubble"},
      {"vTrain data", "A100", "", "megatron-vtrain"},
      {"a blog", "A100", "fsdp", "fsdp"},
      {"a blog", "H100", "fsdp2", "torchtitan"},
      {"a blog", "H100", "", "megatron-core"},
      {"a blog", "V100", "", "megatron-2021"}};
  for (const auto& one : cases) {
    StepRow row = dense();
    row.source = one.source;
    row.gpu = one.gpu;
    row.sharding = one.sharding;
    EXPECT_EQ(framework_of(row), one.framework) << one.source;
  }
}

TEST(RowStrategy, ZeroThreeAroundMegatronIsDeepSpeeds) {
  StepRow row = dense();
  row.gpu = "A100-SXM-80GB";
  row.source = "arXiv:2104.04473 (SC21) Table 2";
  EXPECT_EQ(framework_of(row), "megatron-2021");
  row.sharding = "zero3";
  EXPECT_EQ(framework_of(row), "deepspeed");
}

TEST(RowStrategy, FrameworksByScheduleAndAge) {
  StepRow row = dense();
  row.source = "arXiv:2401.10241 (Zero Bubble …";
  for (const auto& [schedule, framework] :
       std::vector<std::pair<std::string, std::string>>{
           {"1F1B", "megatron-2023"},
           {"1F1B-I", "megatron-2023"},
           {"ZB-2p", "zero-bubble"},
           {"ZB-V", "zero-bubble"},
           {"ZB-2p + all-reduce sync", "zero-bubble-synchronous"}}) {
    row.schedule = schedule;
    EXPECT_EQ(framework_of(row), framework) << schedule;
  }
  for (const auto& [page, framework] :
       std::vector<std::pair<std::string, std::string>>{
           {"llama3_h100_202412_torchtitan.md", "torchtitan"},
           {"llama3-8b_h200_202506_torchtitan.md", "torchtitan-2025"},
           {"h100_2025-03_torchtitan.md", "torchtitan"},
           {"h100_2025-04_torchtitan.md async_tp=1", "torchtitan-async-tp"}}) {
    row.source = page;
    EXPECT_EQ(framework_of(row), framework) << page;
  }
}

}  // namespace echelon::row_test
