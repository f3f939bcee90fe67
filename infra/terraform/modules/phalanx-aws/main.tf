data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

data "aws_ec2_instance_type" "gpu" {
  instance_type = var.gpu_nodes.instance_type
}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.name
  services  = toset(["data", "train", "checkpoint", "monitor"])
  tags      = merge({ "phalanx-cluster" = var.name }, var.tags)
}
