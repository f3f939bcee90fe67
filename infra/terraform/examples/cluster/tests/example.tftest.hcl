# The example makes what its outputs say, and no GPU node before it is asked for one.

mock_provider "aws" {
  source = "../../modules/phalanx-aws/tests/mocks"
}

variables {
  api_access_cidrs = ["203.0.113.7/32"]
}

run "example_gives_urls_and_roles_for_services_and_ranks" {
  assert {
    condition     = output.storage_url == "s3://phalanx-123456789012-data" && output.datasets_url == "s3://phalanx-123456789012-data/datasets" && output.job_storage_url == "s3://phalanx-123456789012-checkpoints"
    error_message = "URLs for the services, for preparation and for job files"
  }
  assert {
    condition     = toset(keys(output.service_role_arns)) == toset(["data", "train", "checkpoint", "monitor"]) && toset(keys(output.rank_role_arns)) == toset(["default"])
    error_message = "a role for each service and for the ranks"
  }
  assert {
    condition     = toset(keys(output.image_repositories)) == toset(["services", "agent"]) && output.efa_interfaces_per_node == 32
    error_message = "repositories for both images"
  }
}
