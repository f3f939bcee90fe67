# One cluster for one team: two GPU nodes at most, none until `gpu_nodes` says so.

terraform {
  required_version = ">= 1.9.0, < 2.0.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = { project = "phalanx" }
  }
}

module "phalanx" {
  source = "../../modules/phalanx-aws"

  name                  = var.name
  availability_zones    = var.availability_zones
  gpu_availability_zone = var.gpu_availability_zone
  api_access_cidrs      = var.api_access_cidrs
  capacity_reservation  = var.capacity_reservation

  gpu_nodes = {
    instance_type = "p5.48xlarge"
    desired_size  = var.gpu_node_count
    max_size      = 2
  }

  rank_scopes = {
    default = { namespace = "training", service_account = "ranks", project = "default" }
  }
}
