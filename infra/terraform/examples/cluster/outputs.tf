output "cluster_name" {
  description = "For `aws eks update-kubeconfig --name`."
  value       = module.phalanx.cluster_name
}

output "storage_url" {
  description = "The services' `storage`."
  value       = module.phalanx.storage_url
}

output "datasets_url" {
  description = "Where datasets are prepared."
  value       = module.phalanx.datasets_url
}

output "job_storage_url" {
  description = "`[job] storage` of job files."
  value       = module.phalanx.job_storage_url
}

output "service_role_arns" {
  description = "For the services' service accounts."
  value       = module.phalanx.service_role_arns
}

output "rank_role_arns" {
  description = "For the ranks' service accounts."
  value       = module.phalanx.rank_role_arns
}

output "image_repositories" {
  description = "Where images are pushed."
  value       = module.phalanx.image_repositories
}

output "efa_interfaces_per_node" {
  description = "vpc.amazonaws.com/efa of a pod that takes a whole node."
  value       = module.phalanx.efa_interfaces_per_node
}
